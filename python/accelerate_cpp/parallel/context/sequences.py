"""Which tokens of a sequence each process of a group has.

A sequence is cut into chunks of equal length. In rank order each process gets one of them; or, for causal attention,
two: process r of n those numbered r and 2n-1-r, because a token attends to all earlier ones, so that late tokens are
more work, and this way each process has an early and a late chunk (zig-zag). Torch's ``context_parallel`` splits in the
same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from accelerate_cpp.comm.single_tensors import all_gather_single
from accelerate_cpp.errors import InvalidArgument

__all__ = ["SequenceSplit"]


@dataclass(frozen=True)
class SequenceSplit:
    """How sequences are split over ``size`` processes.

    Attributes:
        rank: the place of this process among them.
        size: how many there are.
        zigzag: each has an early and a late chunk, instead of consecutive tokens.
    """

    rank: int
    size: int
    zigzag: bool

    @property
    def divisor(self) -> int:
        """What the length of a whole sequence must be a multiple of."""
        return 2 * self.size if self.zigzag else self.size

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The numbers of the chunks of process ``rank``, in the order in which it has them."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def require_divisible(self, buffers: Sequence[torch.Tensor], dims: Sequence[int]) -> None:
        """Refuses ``buffers`` that cannot be split evenly along ``dims``, a dimension for each.

        Raises:
            InvalidArgument: a buffer has no such dimension, or its length is not a multiple of :attr:`divisor`.
        """
        for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
            if not -buffer.dim() <= dim < buffer.dim():
                raise InvalidArgument(
                    f"buffer {index} has shape {tuple(buffer.shape)} and no dimension {dim} to split over the "
                    f"{self.size} processes of context parallelism; pass the dimension of its tokens in buffer_seq_dims"
                )
            length = buffer.shape[dim]
            if length % self.divisor != 0:
                padded = -(-length // self.divisor) * self.divisor
                chunks = "two chunks of tokens" if self.zigzag else "one chunk of tokens"
                raise InvalidArgument(
                    f"buffer {index} has {length} tokens in dimension {dim}, which cannot be split over {self.size} "
                    f"processes with {chunks} each: its length must be a multiple of {self.divisor}; pad it to {padded}"
                )

    def share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's tokens of ``whole`` along ``dim``: a copy, of length 1/``size``.

        Raises:
            InvalidArgument: the length is not a multiple of :attr:`divisor`.
        """
        self.require_divisible([whole], [dim])
        pieces = whole.chunk(self.divisor, dim) if whole.shape[dim] > 0 else [whole] * self.divisor
        return torch.cat([pieces[chunk] for chunk in self.chunks(self.rank)], dim)

    @torch.no_grad()
    def whole(self, share: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        """The inverse of :meth:`share`: the tokens of all processes of ``group`` along ``dim``, in order.

        All of them call it, with shares of one shape and dtype. No gradient flows through it.
        """
        own = share.detach().movedim(dim, 0).contiguous()
        gathered = own.new_empty(self.size, *own.shape)
        all_gather_single(gathered.view(-1), own.view(-1), group=group)
        per_rank = len(self.chunks(0))
        length = own.shape[0] // per_rank
        in_order = gathered.new_empty(self.divisor, length, *own.shape[1:])
        for rank in range(self.size):
            in_order[list(self.chunks(rank))] = gathered[rank].view(per_rank, length, *own.shape[1:])
        return in_order.flatten(0, 1).movedim(0, dim).contiguous()
