"""Sharded training: merging checkpoints of other programs, modules that are not sharded, and how weights are read."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.checkpoint import sharded_states
from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.containment import path_within
from accelerate_cpp.checkpoint.files import read_pickle, replacing
from accelerate_cpp.checkpoint.names import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, SHARDED_MODEL_NAME, WEIGHTS_NAME
from accelerate_cpp.checkpoint.optimizer_names import without_wrappers
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.safetensors_file import without_duplicates, write_safetensors
from accelerate_cpp.config import env_table, plugin_variables
from accelerate_cpp.config.file import waiting_name
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.sharded.units import checkpoint_activations, ignored_parameters, policy_for
from accelerate_cpp.placement.tied_parameters import ensure_weights_retied
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin, class_to_wrap
from accelerate_cpp.utils.not_yet import fsdp2_load_full_state_dict, fsdp2_switch_optimizer_parameters
from accelerate_cpp.utils.operations import broadcast_object_list, process_index
from accelerate_cpp.utils.other import is_peft_model

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

__getattr__ = lending("utils.fsdp_utils")

_METADATA = ".metadata"
_PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def enable_fsdp_ram_efficient_loading() -> None:
    """Makes models of transformers read their weights only on rank 0, through the variables that transformers reads.

    One of them, ``ACCELERATE_USE_FSDP``, says that parameters are sharded.
    """
    env_table.export({env_table.USE_FSDP: True})
    env_table.export({plugin_variables.FSDP["cpu_ram_efficient_loading"]: True})


def disable_fsdp_ram_efficient_loading() -> None:
    """Makes models of transformers read their weights on every process again."""
    env_table.export({plugin_variables.FSDP["cpu_ram_efficient_loading"]: False})


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Shards ``model`` in place, as ``prepare`` does, and returns it; it is not cast and not compiled."""
    return accelerator._session.strategy.prepare(Bundle(models=[model])).models[0]  # type: ignore[no-any-return]


def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Lets the units of ``model`` compute their activations again in the backward pass, in place, and returns it."""
    plugin = accelerator.state.fsdp_plugin
    ignored = ignored_parameters(plugin, model, accelerator.device)
    on_host = bool(plugin.activation_checkpointing_offload)
    checkpoint_activations(model, policy_for(plugin, model), ignored, on_host)
    return model


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Torch's scaler with these arguments; an ``Accelerator`` makes its own, which knows of overflows on all ranks."""
    return torch.amp.GradScaler(**kwargs)


def _trained_names(accelerator: Any, model: torch.nn.Module, adapter_only: bool) -> set[str] | None:
    """The names of what an adapter trains; ``None`` where all of the model is meant."""
    inner = accelerator._session.strategy.unwrap(model)
    if not (adapter_only and is_peft_model(inner)):
        return None
    return {name for name, weight in inner.named_parameters() if weight.requires_grad}


def _files(accelerator: Any, folder: str | os.PathLike[str], name: str) -> tuple[Path, Participants]:
    """The folder that holds the folder ``name``, which may be meant itself; and who takes part."""
    path = Path(folder)
    return path.parent if path.name == name else path, Participants(accelerator._session.topology)


def _named_parameters(accelerator: Any, model: torch.nn.Module) -> list[list[tuple[str, torch.Tensor]]]:
    strategy = accelerator._session.strategy
    return [list(strategy.named_parameters(strategy.unwrap(model)))]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes the state of a prepared model into ``output_dir``, whole or in shards as the plugin says. A collective.

    ``Accelerator.save_state`` writes all states in one step, so that a process that is killed leaves no half of them.

    Args:
        fsdp_plugin: that of the run.
        model_index: the number of the model, for the name of its file or folder.
        adapter_only: of a model of PEFT, only what is trained.
        use_dcp: only ``True`` is accepted: files that need the same number of processes again are not written.

    Raises:
        InvalidArgument: ``use_dcp`` is false.
    """
    _require_dcp("save_fsdp_model", use_dcp)
    folder, ranks = _files(accelerator, output_dir, "")
    folder.mkdir(parents=True, exist_ok=True)
    only = _trained_names(accelerator, model, adapter_only)
    sharded_states.write_model(folder, model_index, model, accelerator._session.strategy, ranks, only)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads what :func:`save_fsdp_model`, ``save_state`` or the original wrote, in any layout. A collective.

    Returns:
        An object without ``missing_keys`` and ``unexpected_keys``, as these are errors.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit; in that case nothing has been changed.
    """
    _require_dcp("load_fsdp_model", use_dcp)
    folder, ranks = _files(accelerator, input_dir, f"{SHARDED_MODEL_NAME}_{model_index}")
    strict = _trained_names(accelerator, model, adapter_only) is None
    sharded_states.load_model(folder, model_index, model, accelerator._session.strategy, ranks, strict)
    return torch.nn.modules.module._IncompatibleKeys([], [])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes the state of a prepared optimizer of ``model``, as :func:`save_fsdp_model` that of a model."""
    _require_dcp("save_fsdp_optimizer", use_dcp)
    folder, ranks = _files(accelerator, output_dir, "")
    folder.mkdir(parents=True, exist_ok=True)
    names = _named_parameters(accelerator, model)
    sharded_states.write_optimizer(folder, optimizer_index, optimizer, names, accelerator._session.strategy, ranks)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Loads what :func:`save_fsdp_optimizer`, ``save_state`` or the original wrote, in any layout. A collective."""
    _require_dcp("load_fsdp_optimizer", use_dcp)
    folder, ranks = _files(accelerator, input_dir, f"{OPTIMIZER_NAME}_{optimizer_index}")
    names = _named_parameters(accelerator, model)
    sharded_states.load_optimizer(folder, optimizer_index, optimizer, names, ranks)


def _require_dcp(function: str, use_dcp: bool) -> None:
    if not use_dcp:
        raise InvalidArgument(
            f"{function}: use_dcp=False means files of each process that only the same number of processes can read; "
            "leave it out"
        )


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device | str
) -> set[torch.nn.Parameter]:
    """The parameters of the modules that are not sharded; the modules are moved to ``device``.

    Args:
        modules: modules, a regular expression that matches their full names in ``model``, or ``None``.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        name = re.compile(modules)
        modules = [module for path, module in model.named_modules() if name.fullmatch(path)]
    elif isinstance(modules, torch.nn.Module):
        modules = [modules]
    return {parameter for module in modules for parameter in module.to(device).parameters()}


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """``named_params`` under their names in the user's model, without those of wrappers."""
    return {without_wrappers(name): value for name, value in named_params.items()}


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    """A function that tells which modules of ``model`` are sharded separately; ``None`` if the plugin has no policy or
    a custom one.

    Wrappers of layers whose activations are recomputed are looked through.

    Raises:
        InvalidArgument: ``model`` has no layer of a class to be wrapped.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy = fsdp2_plugin.auto_wrap_policy
    kind = policy.func if isinstance(policy, functools.partial) else policy
    if kind is size_based_auto_wrap_policy:
        smallest = fsdp2_plugin.min_num_params or 0
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) > smallest
    if kind is not transformer_auto_wrap_policy:
        return None
    names = fsdp2_plugin.transformer_cls_names_to_wrap
    if names is None:
        names = getattr(model, "_no_split_modules", None) or []
    classes = tuple({class_to_wrap(model, name) for name in names})
    return lambda module: isinstance(getattr(module, "_checkpoint_wrapped_module", module), classes)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Writes the weights of a sharded checkpoint (torch's distributed format) into one file, on the main process.

    A collective: errors of the main process are raised on all processes.

    Args:
        checkpoint_dir: the folder with the file ``.metadata``.
        output_path: the folder for ``model.safetensors``; it is created.
        safe_serialization: if false, ``pytorch_model.bin`` by ``torch.save``.
        remove_checkpoint_dir: whether to remove ``checkpoint_dir`` when the file is complete.

    Raises:
        InvalidArgument: ``checkpoint_dir`` is not such a folder, or safetensors cannot store its content.
        CheckpointError: it is damaged.
    """
    error: Exception | None = None
    if process_index() == 0:
        try:
            source = _folder_of_shards(Path(checkpoint_dir))
            _merge(source, Path(output_path), safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(source)
        except Exception as raised:
            error = raised
    (failure,) = broadcast_object_list([None if error is None else str(error)])
    if error is not None:
        raise error
    if failure is not None:
        raise CheckpointError(f"the main process could not merge: {failure}")


def _folder_of_shards(folder: Path) -> Path:
    if (folder / _METADATA).is_file():
        return folder
    nearby = [str(folder / name) for name in _PARTS if (folder / name / _METADATA).is_file()]
    hint = f"pass {' or '.join(nearby)}" if nearby else "pass the folder that torch.distributed.checkpoint wrote"
    raise InvalidArgument(f"{folder}: expected a sharded checkpoint, found no file {_METADATA}; {hint}")


def _merge(source: Path, target: Path, safe_serialization: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    whole = waiting_name(target / WEIGHTS_NAME)
    try:
        try:
            stored = FileSystemReader(source).read_metadata().storage_data or {}
            for part in {place.relative_path for place in stored.values()}:
                path_within(source, part, source / _METADATA)
            dcp_to_torch_save(source, whole)
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:  # the latter, of torch, is not a subclass of the former
            reasons = [str(cause) for cause, _ in getattr(error, "failures", {}).values()] or [str(error)]
            raise CheckpointError(
                f"{source}: the sharded checkpoint cannot be read ({reasons[0]}); a part may be missing or damaged"
            ) from error
        state = _weights_in(read_pickle(whole, "the merged weights", mmap=True))
        with replacing(target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)) as waiting:
            if safe_serialization:
                write_safetensors(waiting, without_duplicates(state))
            else:
                write_pickle(waiting, state)
    finally:
        whole.unlink(missing_ok=True)


def _weights_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value under ``model`` or another single key, or ``content`` if it contains the weights itself."""
    (*_, last) = content.values() or (None,)
    inner = last if len(content) == 1 else None
    if isinstance(inner, Mapping) and all(isinstance(value, torch.Tensor) for value in inner.values()):
        return inner
    return content
