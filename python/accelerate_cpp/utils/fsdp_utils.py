"""Checkpoints of sharded training, as other programs write them, made whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accelerate_cpp.checkpoint.files import read_pickle, replacing, write_pickle
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate_cpp.checkpoint.safetensors_file import without_duplicates, write_safetensors
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.utils.operations import broadcast_object_list, process_index

__all__ = ["merge_fsdp_weights"]

_METADATA = ".metadata"
_PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Writes the weights of a sharded checkpoint (torch's distributed format) into one file, on the main process.

    A collective: what fails there is raised on all processes.

    Args:
        checkpoint_dir: the folder with the file ``.metadata``.
        output_path: the folder that gets ``model.safetensors``; it is made.
        safe_serialization: if false, ``pytorch_model.bin`` by ``torch.save``.
        remove_checkpoint_dir: whether to remove ``checkpoint_dir`` once the file is whole.

    Raises:
        InvalidArgument: ``checkpoint_dir`` is no such folder, or safetensors cannot hold what is in it.
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
    whole = target / f"merging-{os.getpid()}.tmp"
    try:
        try:
            dcp_to_torch_save(source, whole)
        except (Exception, CheckpointException) as error:  # the latter, of torch, is none of the former
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
    """What stands under ``model`` or another single key, or ``content`` if it holds the weights itself."""
    (*_, last) = content.values() or (None,)
    inner = last if len(content) == 1 else None
    if isinstance(inner, Mapping) and all(isinstance(value, torch.Tensor) for value in inner.values()):
        return inner
    return content
