"""Gradients averaged over the ranks through buckets in shared memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.collectives import all_gather, check_operation
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.shared_memory import shared_empty

_BUCKET_BYTES = 4 << 20  # what is copied in is still in the processor's cache when it is reduced


def average(
    tensors: Sequence[torch.Tensor | None], zeros: Callable[[int], torch.Tensor] | None = None
) -> list[torch.Tensor | None]:
    """The mean over the ranks of each tensor, as new tensors; the inputs are not written to.

    All ranks pass as many tensors, of the same shapes and dtypes. One that no rank has stays ``None``; one that some
    rank has is 0 on the others, as in torch's data parallelism.

    Args:
        tensors: of floating-point dtypes, on the CPU, in any mixture of dtypes; ``None`` where this rank has none.
        zeros: gives zeros for tensor number ``i``, which this rank lacks and another has; on all ranks or on none.

    Raises:
        InvalidArgument: a tensor of integers; or, without ``zeros`` and on all ranks, a tensor that only some have.
        MismatchedCollective: the ranks pass different tensors.
    """
    check_operation("mean", [tensor.dtype for tensor in tensors if tensor is not None])
    given = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
    if processes().world_size == 1:
        return [None if tensor is None else tensor.clone() for tensor in given]
    for index, holders in enumerate(_holders(given)):
        if not holders.any() or holders.all():
            continue
        if zeros is None:
            lacking = int((~holders).nonzero()[0])
            raise InvalidArgument(
                f"average: tensor {index} is missing on rank {lacking} and given on another; pass zeros for what a "
                "rank has not used"
            )
        if given[index] is None:
            given[index] = zeros(index).contiguous()
    present = [tensor for tensor in given if tensor is not None]
    averaged = iter(_averaged(present))
    return [None if tensor is None else next(averaged) for tensor in given]


def _holders(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Which ranks have a tensor: bool of shape ``(tensors, world_size)``. A collective."""
    own = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.bool)
    (flags,) = all_gather([own])
    return flags.t()


def _averaged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    averages = [torch.empty_like(tensor) for tensor in tensors]
    alike: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.dtype].append(index)
    for dtype, indices in alike.items():
        bucket = _bucket(dtype)
        for pieces in _buckets([tensors[index].numel() for index in indices], bucket.numel()):
            used = bucket[: sum(stop - start for _, start, stop in pieces)]
            parts = used.split([stop - start for _, start, stop in pieces])
            for (place, start, stop), part in zip(pieces, parts, strict=True):
                part.copy_(tensors[indices[place]].view(-1)[start:stop])
            dist.all_reduce(used, dist.ReduceOp.AVG)
            for (place, start, stop), part in zip(pieces, parts, strict=True):
                averages[indices[place]].view(-1)[start:stop].copy_(part)
    return averages


def _buckets(lengths: Sequence[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """The pieces ``(tensor, start, stop)`` of each bucket of at most ``size`` elements, which are filled in order."""
    pieces: list[tuple[int, int, int]] = []
    room = size
    for place, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            pieces.append((place, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


_kept: dict[torch.dtype, torch.Tensor] = {}


def _bucket(dtype: torch.dtype) -> torch.Tensor:
    """Memory that is kept for the next average."""
    if dtype not in _kept:
        _kept[dtype] = shared_empty(_BUCKET_BYTES // dtype.itemsize, dtype=dtype)
    return _kept[dtype]
