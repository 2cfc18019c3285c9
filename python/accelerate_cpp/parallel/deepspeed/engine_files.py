"""The files of an engine: DeepSpeed writes and reads them, in folders that it calls tags."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.errors import CheckpointError

__all__ = ["load_engine", "save_engine"]

_OF_TORCH = "TorchCheckpointEngine"
# What is in its files besides tensors and plain values: by module, classes that only hold values.
_HELD = {
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
}


def save_engine(
    engine: Any, folder: Path, tag: str, write: Callable[[Path, Any], object], is_first: bool, **options: Any
) -> Exception | None:
    """Writes the model, the optimizer and the schedule of ``engine`` into ``folder / tag``. A collective.

    Args:
        write: writes a pickle to a path.
        is_first: whether the file ``latest``, which scripts of DeepSpeed read, is to name this tag.
        options: of its ``save_checkpoint``.

    Returns:
        What came first on this rank of errors of its files: what the system refused, or content that cannot be
        pickled. DeepSpeed itself would leave its collectives there, in which the others wait.
    """
    failed: list[Exception] = []

    def kept(call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, unless something has failed already; its errors are kept."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return None if failed else call(*args, **kwargs)
            except Exception as error:
                failed.append(error)
                return None

        return attempt

    files = engine.checkpoint_engine
    names_latest = options.pop("save_latest", is_first)
    with ExitStack() as changed:
        if type(files).__name__ == _OF_TORCH:  # others have formats of their own, and threads
            own = {"makedirs": kept(files.makedirs)}
            if files.zipfile_serialization:
                own["save"] = kept(lambda state_dict, path: write(Path(path), state_dict))
            else:
                own["save"] = kept(files.save)
            changed.enter_context(_with(files, own))
            changed.enter_context(_with(engine, {"_copy_recovery_script": kept(engine._copy_recovery_script)}))
        engine.save_checkpoint(str(folder), tag, save_latest=False, **options)
    if names_latest and engine.global_rank == 0:
        kept((folder / "latest").write_text)(tag)
    return failed[0] if failed else None


@contextmanager
def _with(target: Any, functions: Mapping[str, Any]) -> Iterator[None]:
    """``target`` has these functions instead of the ones of its class."""
    vars(target).update(functions)
    try:
        yield
    finally:
        for name in functions:
            vars(target).pop(name, None)


@contextmanager
def _reading(folder: Path, read: Callable[..., Any]) -> Iterator[None]:
    """``torch.load`` of this thread reads files in ``folder`` by ``read``.

    DeepSpeed calls it in many places, those of universal checkpoints among them, and asks it to run what a pickle says.
    """
    classes = [getattr(importlib.import_module(module), name) for module, names in _HELD.items() for name in names]
    load, thread, inside = torch.load, threading.get_ident(), os.path.abspath(folder)

    def safe_load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not kwargs.get("weights_only") and isinstance(f, (str, os.PathLike)):
            path = Path(os.path.abspath(f))
            if path.is_relative_to(inside):
                return read(path, map_location, classes)
        return load(f, map_location, *args, **kwargs)

    torch.load = safe_load
    try:
        yield
    finally:
        torch.load = load


def load_engine(engine: Any, folder: Path, tag: str, read: Callable[..., Any], **options: Any) -> None:
    """Reads what :func:`save_engine`, or the original, has written. A collective.

    Args:
        read: called with a path, the device and classes that may be in the file, to read it without running code.
        options: of its ``load_checkpoint``.

    Raises:
        CheckpointError: DeepSpeed cannot read the files, or finds none.
    """
    try:
        with _reading(folder, read):
            found, _ = engine.load_checkpoint(str(folder), tag, **options)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder / tag}: DeepSpeed cannot load it: {type(error).__name__}: {error}. Load it with the same number "
            "of processes and the same stage of ZeRO, or make one file of weights of it by zero_to_fp32.py, which is "
            f"in {folder}"
        ) from error
    if found is None:
        raise CheckpointError(
            f"{folder / tag} has no checkpoint of DeepSpeed; load a folder that save_state wrote in a run with "
            "DeepSpeed"
        )
