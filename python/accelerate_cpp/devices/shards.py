"""Tensors of which each process holds a part."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded_tensor(value: Any) -> bool:
    """Whether ``value`` is a ``DTensor``; the module of these takes long to import, and is not for this question."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this process has; all of it unless it is in shards."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor  # type: ignore[attr-defined]


def inner_tensor(value: Any) -> Any:
    """What this process has of ``value``, the tensor itself where :func:`local_part` makes a view of it."""
    return value._local_tensor if is_sharded_tensor(value) else value


def sharded_like(parameter: Any, value: Any) -> Any:
    """``value``, of which this process has the whole, in shards like ``parameter`` if it has an entry for each element.

    Only the part of this process is copied, to the device of the parameter. Other values are returned as they are.
    """
    if not is_sharded_tensor(parameter) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if is_sharded_tensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(value, mesh, parameter.placements, src_data_rank=None).to(mesh.device_type)


def empty_like(parameter: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Memory for a tensor in shards like ``parameter``."""
    return wrapped_like(parameter, torch.empty(parameter.to_local().shape, dtype=dtype, device=device))


def wrapped_like(parameter: Any, local: torch.Tensor) -> Any:
    """``local``, the part of this process, as a tensor in shards like ``parameter``."""
    return _wrapped(local, parameter, parameter.device_mesh, parameter.placements)


def rows_wrapped(rows: torch.Tensor, whole: torch.Tensor, mesh: Any) -> Any:
    """``rows`` of this process as a tensor like ``whole``, whose rows the last axis of ``mesh`` shares out.

    Along the other axes there are replicas.
    """
    from torch.distributed.tensor import Replicate, Shard

    return _wrapped(rows, whole, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])


def rows_of_rank(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of ``whole`` that ``rank`` of ``size`` has, as many as ``torch.chunk`` gives it."""
    rows = -(-len(whole) // size)
    return whole[min(rank * rows, len(whole)) : min((rank + 1) * rows, len(whole))]


def _wrapped(local: torch.Tensor, like: torch.Tensor, mesh: Any, placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
