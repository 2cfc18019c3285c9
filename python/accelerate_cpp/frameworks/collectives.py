"""Collectives on tensors of torch in host memory, through the process group of the run.

Those tensors view memory of another framework, which may not be written to: results are new tensors. All ranks call the
same functions in the same order, with tensors of the same shapes and dtypes. A dead rank raises ``PeerLost`` with its
number, different calls ``MismatchedCollective``, a passed deadline ``Timeout``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_cpp.comm.single_tensors import all_gather_single, reduce_scatter_single
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.processes import processes

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
OPERATIONS = tuple(_REDUCTIONS)


def check_operation(op: str, dtypes: Sequence[torch.dtype]) -> None:
    """Raises ``InvalidArgument`` for an ``op`` that is not one of :data:`OPERATIONS`, and for a mean of integers."""
    if op not in _REDUCTIONS:
        raise InvalidArgument(f"op={op!r}: expected {', '.join(map(repr, OPERATIONS))}")
    whole = next((dtype for dtype in dtypes if not (dtype.is_floating_point or dtype.is_complex)), None)
    if op == "mean" and whole is not None:
        raise InvalidArgument(f"op='mean' of {whole}: expected floating-point numbers; convert them first, or sum")


def check_root(root: int, world_size: int) -> None:
    """Raises ``InvalidArgument`` unless ``root`` is a rank."""
    if not 0 <= root < world_size:
        raise InvalidArgument(f"root={root}: expected a rank from 0 to {world_size - 1}")


def check_divisible(shape: Sequence[int], world_size: int) -> None:
    """Raises ``InvalidArgument`` unless the first dimension of ``shape`` can be cut into equal parts for the ranks."""
    if not shape or shape[0] % world_size:
        raise InvalidArgument(
            f"reduce_scatter of shape {tuple(shape)}: expected a first dimension that is a multiple of the number of "
            f"processes, {world_size}, each of which gets a part; pad it"
        )


def all_reduce(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Each tensor reduced over the ranks, on every rank.

    Args:
        tensors: dense, on the CPU.
        op: one of :data:`OPERATIONS`; ``"mean"`` takes floating-point numbers only.

    Raises:
        InvalidArgument: another ``op``, or a mean of integers.
    """
    check_operation(op, [tensor.dtype for tensor in tensors])
    alone = processes().world_size == 1
    reduced = [_copy(tensor) for tensor in tensors]
    for tensor in [] if alone else reduced:
        dist.all_reduce(tensor, _REDUCTIONS[op])
    return reduced


def all_gather(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor of every rank, on every rank: shape ``(world_size, *shape)``, in the order of ranks."""
    world_size = processes().world_size
    gathered = []
    for tensor in tensors:
        whole = torch.empty((world_size, *tensor.shape), dtype=tensor.dtype)
        if world_size == 1:
            whole[0] = tensor
        else:
            all_gather_single(whole.view(-1), tensor.detach().contiguous().view(-1))
        gathered.append(whole)
    return gathered


def broadcast(tensors: Sequence[torch.Tensor], root: int = 0) -> list[torch.Tensor]:
    """Each tensor as rank ``root`` has it, on every rank.

    Raises:
        InvalidArgument: ``root`` is no rank.
    """
    world_size = processes().world_size
    check_root(root, world_size)
    copies = [_copy(tensor) for tensor in tensors]
    for tensor in [] if world_size == 1 else copies:
        dist.broadcast(tensor, root)
    return copies


def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """This rank's part of each tensor reduced over the ranks: rows ``rank * n`` to ``(rank + 1) * n`` of
    ``world_size * n``.

    Raises:
        InvalidArgument: as :func:`all_reduce`; or a first dimension is no multiple of ``world_size``.
    """
    check_operation(op, [tensor.dtype for tensor in tensors])
    world_size = processes().world_size
    for tensor in tensors:
        check_divisible(tensor.shape, world_size)
    if world_size == 1:
        return [_copy(tensor) for tensor in tensors]
    parts = []
    for tensor in tensors:
        part = torch.empty((tensor.shape[0] // world_size, *tensor.shape[1:]), dtype=tensor.dtype)
        reduce_scatter_single(part, tensor.detach().contiguous(), _REDUCTIONS[op])
        parts.append(part)
    return parts


def barrier() -> None:
    """Returns when every rank has called it."""
    if processes().world_size > 1:
        dist.barrier()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
