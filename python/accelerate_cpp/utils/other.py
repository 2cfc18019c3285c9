"""Waiting for all processes, models without their wrappers, files that one process writes for all, small helpers."""

from __future__ import annotations

import logging
import operator
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.files import read_pickle, replacing
from accelerate_cpp.checkpoint.safetensors_file import without_duplicates, write_safetensors
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.launch.plan.machines import DEFAULT_PORT
from accelerate_cpp.parallel.compilation import inside_compiler
from accelerate_cpp.parallel.wrappers import without_wrapper
from accelerate_cpp.precision import forward
from accelerate_cpp.prepare.compile_regions import compile_regions as compile_regions
from accelerate_cpp.prepare.compile_regions import has_compiled_regions as has_compiled_regions
from accelerate_cpp.prepare.compile_regions import has_repeated_blocks as has_repeated_blocks
from accelerate_cpp.prepare.compile_regions import is_compiled_module as is_compiled_module
from accelerate_cpp.prepare.compile_regions import is_repeated_blocks as is_repeated_blocks
from accelerate_cpp.prepare.compile_regions import taken_out
from accelerate_cpp.runtime import current
from accelerate_cpp.utils.operations import process_index, world_size

__getattr__ = lending("utils.other")

_logger = logging.getLogger(__name__)

# Processes that share GPUs with several data loaders have hung on Linux before this version.
_OLDEST_LINUX = (5, 5)


def wait_for_everyone() -> None:
    """Returns when every process has called it."""
    if current.session is not None:
        kind_of(current.session.device).sync()
    if world_size() > 1:
        dist.barrier()


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """Returns the module inside the wrappers that distribute it. ``model`` itself stays compiled and distributed.

    Args:
        keep_fp32_wrapper: keep the module's mixed-precision ``forward`` instead of restoring its own.
        keep_torch_compile: return a model that is compiled like ``model``, as a whole or by regions.
        recursive: also take submodules out of their wrappers, in place.
    """
    kept = taken_out(model, keep_torch_compile)
    inner = inside_compiler(kept)
    if not keep_fp32_wrapper:
        for module in (kept, inner):
            forward.remove(module)
    if recursive:
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                setattr(parent, name, without_wrapper(child))
    return kept


def saves_here(save_on_each_node: bool = False) -> bool:
    """Whether this process writes shared files: rank 0, or rank 0 of each host."""
    if save_on_each_node and current.session is not None:
        return current.session.topology.local_rank == 0
    return process_index() == 0


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Saves ``obj`` on the main process, or on the main process of each host; it has no effect on other processes.

    Args:
        f: a path, which is replaced in one step, or, for pickles, a file that is open for writing.
        safe_serialization: in the safetensors format, for a dict of tensors, instead of by ``torch.save``.

    Raises:
        ValueError: the safetensors format cannot hold a value of ``obj``.
        OSError: the system refused to write.
    """
    if not saves_here(save_on_each_node):
        return
    if current.session is not None:
        obj = kind_of(current.session.device).to_host(obj)
    if not isinstance(f, str | os.PathLike):
        torch.save(obj, f)
        return
    with replacing(Path(f)) as path:
        if safe_serialization:
            write_safetensors(path, without_duplicates(cast(Mapping[str, Any], obj), warns=True))
        else:
            write_pickle(path, obj)


def load(f: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load`` of a path with ``weights_only=True``, unless ``kwargs`` say otherwise; knows NumPy's arrays.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    return read_pickle(Path(f), "what torch.save wrote", map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state_dict`` in a form that safetensors can store: contiguous tensors, and only the first name of tied
    weights.

    Values that are not tensors stay as they are; ``state_dict`` is not changed.
    """
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in without_duplicates(state_dict, warns=True).items()
    }


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules in ``model``, each after its submodules; ``model`` is last.

    Args:
        return_fqns: return pairs of the name in ``model`` and the module instead of modules.
    """
    modules: list[tuple[str, torch.nn.Module]] = []
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        modules.append((name, module))
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    return [named if return_fqns else named[1] for named in reversed(modules)]


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Whether a parameter of ``model`` is a ``DTensor``, whose parts are on several processes."""
    from torch.distributed.tensor import DTensor  # takes a while to import

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def convert_bytes(size: float) -> str:
    """``size`` in the largest unit of 1024 that keeps it at 1 or more, as ``"1.5 KB"``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Copies the entries of ``source`` into ``destination``, nested dicts key by key, and returns ``destination``."""
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.get(key, {})) if isinstance(value, dict) else value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The nested attribute that ``attr`` names, such as ``"encoder.layers"``; ``AttributeError`` without one."""
    return operator.attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or that of the class of another object."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def get_model_tp_size(model: Any) -> int | None:
    """The number of processes over which transformers has split the layers of ``model``; ``None`` without any."""
    noted: int | None = getattr(model, "tp_size", None)
    if noted is not None:
        return noted
    config = getattr(getattr(model, "config", None), "distributed_config", None)  # of transformers from version 5 on
    return config.get("tp_size") if isinstance(config, Mapping) else getattr(config, "tp_size", None)


def is_peft_model(model: Any) -> bool:
    """Whether ``model``, without wrappers that distribute or compile it, is a ``PeftModel``. Does not import peft."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, torch.nn.Module):
        return False
    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a program on this machine accepts connections on TCP ``port``; by default that of rank 0, 29500."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else int(port))) == 0


def check_os_kernel() -> None:
    """Warns, on the main process, about a Linux older than 5.5, on which runs with several processes may hang."""
    system = platform.uname()
    version = re.match(r"(\d+)\.(\d+)", system.release)
    if system.system != "Linux" or version is None or process_index() != 0:
        return
    if (int(version[1]), int(version[2])) < _OLDEST_LINUX:
        _logger.warning(
            f"Detected kernel version {system.release}, which is below the recommended minimum of 5.5.0: runs with "
            "several processes may hang; use a newer one"
        )
