"""The consecutive part of some inputs that each process works on."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument


def rows_of_rank(length: int, world_size: int, rank: int) -> list[int]:
    """The consecutive row numbers of ``rank``; none for a rank that is left without any."""
    share, extras = divmod(length, world_size)
    start = rank * share + min(rank, extras)
    stop = start + share + (rank < extras)
    return list(range(start, stop))


def part_of(inputs: Any, world_size: int, rank: int, pad_to: torch.device | None) -> Any:
    """The part of ``inputs`` for ``rank``; the first ranks get the remaining items.

    Args:
        inputs: a list, tuple, tensor (cut along its first dimension) or ``datasets.Dataset``, or a dict of them with
            equal lengths, whose values are replaced in place. Other objects are returned as they are.
        pad_to: repeat the last of all items until the parts are equally long, with tensors on this device; ``None``
            does not.

    Raises:
        InvalidArgument: the values of a dict have different lengths.
        TypeError: a tuple would have to be padded.
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(f"split_between_processes: the values of a dict need one length, found {lengths}")
        for key, value in inputs.items():
            inputs[key] = part_of(value, world_size, rank, pad_to)
        return inputs
    if not isinstance(inputs, list | tuple | torch.Tensor) and not _is_dataset(inputs):
        return inputs
    if isinstance(inputs, tuple) and pad_to is not None and len(inputs) % world_size != 0:
        raise TypeError(
            f"split_between_processes cannot pad a tuple of {len(inputs)} items for {world_size} processes; pass a list"
        )
    rows = rows_of_rank(len(inputs), world_size, rank)
    if pad_to is not None:
        rows += [len(inputs) - 1] * (math.ceil(len(inputs) / world_size) - len(rows))
    return _select(inputs, rows, device=pad_to)


def _select(inputs: Any, rows: list[int], device: torch.device | None) -> Any:
    if _is_dataset(inputs):
        return inputs.select(rows)
    if isinstance(inputs, torch.Tensor):
        return inputs[rows].to(device) if device is not None else inputs[rows]
    part = (inputs[row] for row in rows)
    return tuple(part) if isinstance(inputs, tuple) else list(part)


def _is_dataset(value: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)
