"""The files of an engine: DeepSpeed writes and reads them, in folders that it calls tags."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate_cpp.errors import CheckpointError

__all__ = ["load_engine", "save_engine"]

# What is in its files besides tensors and plain values: by module, classes that only hold values.
_HELD = {
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
}


def save_engine(engine: Any, folder: Path, tag: str, is_first: bool, **options: Any) -> None:
    """Writes the model, the optimizer and the schedule of ``engine`` into ``folder / tag``. A collective.

    Args:
        is_first: whether the file ``latest``, which scripts of DeepSpeed read, is to name this tag.
        options: of its ``save_checkpoint``.
    """
    engine.save_checkpoint(str(folder), tag, **{"save_latest": is_first, **options})


def load_engine(engine: Any, folder: Path, tag: str, read: Callable[..., Any], **options: Any) -> None:
    """Reads what :func:`save_engine`, or the original, has written. A collective.

    Args:
        read: called with a path, the device and classes that may be in the file, to read it without running code.
        options: of its ``load_checkpoint``.

    Raises:
        CheckpointError: DeepSpeed cannot read the files, or finds none.
    """
    files = engine.checkpoint_engine
    if type(files).__name__ == "TorchCheckpointEngine":  # others have formats of their own
        classes = [getattr(importlib.import_module(module), name) for module, names in _HELD.items() for name in names]
        files.load = lambda path, map_location=None: read(Path(path), map_location, classes)
    try:
        found, _ = engine.load_checkpoint(str(folder), tag, **options)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder / tag}: DeepSpeed cannot load it: {type(error).__name__}: {error}. Load it with the same number "
            "of processes and the same stage of ZeRO, or make one file of weights of it by zero_to_fp32.py, which is "
            f"in {folder}"
        ) from error
    finally:
        vars(files).pop("load", None)
    if found is None:
        raise CheckpointError(
            f"{folder / tag} has no checkpoint of DeepSpeed; load a folder that save_state wrote in a run with "
            "DeepSpeed"
        )
