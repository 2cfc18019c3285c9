"""Removes from gathered metrics what counts no sample: the rows that were repeated to complete the last batch of a
loader, and those of processes that compute with the same batch as another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.devices.tree import honor_type, rebuild_mapping, recursively_apply
from accelerate_cpp.runtime.gradient_state import GradientState

__all__ = ["all_tensors", "drop_repeated", "one_per_batch", "rows_of_last_batch"]


def one_per_batch(gathered: Any, pickled: bool, mesh: Mesh) -> Any:
    """Of the ranks that compute with the same batches, keeps what the first one gave.

    Args:
        gathered: tensors with equally many rows of each rank in nested containers, or if ``pickled`` the items
            that each rank gave.
        mesh: of all ranks.
    """
    ranks = mesh.one_rank_per_batch()
    if pickled:
        return [item for rank in ranks for item in gathered[rank]]
    if len(ranks) == mesh.world_size:
        return gathered
    return recursively_apply(lambda rows: rows.unflatten(0, (mesh.world_size, -1))[ranks].flatten(0, 1), gathered)


def all_tensors(data: Any) -> bool:
    """Whether nested ``data`` holds nothing but tensors."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def rows_of_last_batch(state: GradientState, num_processes: int) -> tuple[frozenset[int | None], int] | None:
    """The lengths that a completed last batch can have once gathered, and how many of its rows are real.

    A full batch is one of them also where none was completed, as in one process: libraries repeat a mean loss so often.
    Where batches have no common size, the last ones of all processes together are.
    ``None`` if nothing has to be dropped: not the last batch, or a full or an unknown remainder.
    """
    if not state.end_of_dataloader or state.remainder <= 0:
        return None
    loader, real = state.active_dataloader, state.remainder
    total = loader.total_batch_size  # type: ignore[union-attr]
    if total is None:
        total = sum(getattr(loader, "completed", ())) or None
    return frozenset({total, math.ceil(real / num_processes) * num_processes}), real


def drop_repeated(gathered: Any, local: Any, pickled: bool, lengths: frozenset[int | None], real: int) -> Any:
    """Cuts to ``real`` rows whatever has one of ``lengths``; 0-dim tensors of ``local`` have no rows to cut."""
    if pickled:
        return gathered[:real] if isinstance(gathered, Sequence) and len(gathered) in lengths else gathered
    if isinstance(local, torch.Tensor):
        return gathered[:real] if local.ndim > 0 and len(gathered) in lengths else gathered
    if isinstance(local, Mapping):
        cut = {key: drop_repeated(gathered[key], value, False, lengths, real) for key, value in local.items()}
        return rebuild_mapping(gathered, cut)
    pairs = zip(gathered, local, strict=True)
    return honor_type(gathered, (drop_repeated(whole, part, False, lengths, real) for whole, part in pairs))
