"""Blocks of a program within which sequences are split over processes, and attention is over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.context.attention import attention, zigzag
from accelerate_cpp.parallel.context.interception import recomputed_within, replaced_attention, saved_as
from accelerate_cpp.parallel.context.sequences import SequenceSplit

__all__ = ["ContextParallel"]


class ContextParallel:
    """Splits sequences over the processes of ``group``, which together compute attention over all tokens.

    Each process computes everything but attention for its tokens only. So a loss that a process computes is over its
    tokens, and the gradients of weights are to be added up, or averaged, over the group.

    Args:
        group: of this process and those that have other parts of the same sequences. Attention communicates in it in
            forward and backward passes, in the order in which models call it: best nobody else uses this group.
        strategy: ``"allgather"``, ``"alltoall"`` or ``"ulysses"``, see :func:`.attention.attention`.

    Raises:
        InvalidArgument: there is no such strategy.
    """

    def __init__(self, group: dist.ProcessGroup, strategy: str) -> None:
        self.group = group
        self.strategy = strategy
        size = dist.get_world_size(group)
        self.sequences = SequenceSplit(dist.get_rank(group), size, zigzag=zigzag(strategy) and size > 1)

    @contextmanager
    def split(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Within the block, each of ``buffers`` has this process's tokens only, and attention is over all of them.

        Tensors are changed in place: they refer to other memory meanwhile, and to what they had before after the block,
        also when it raises; what the block writes into them is lost. Views of them that exist already stay whole.
        Backward passes can run within the block or after it, and so can those that compute activation checkpoints
        again. Blocks can be nested, then the innermost one decides how attention is computed.

        Args:
            buffers: tensors with whole sequences, equal on all processes of the group: inputs, labels, positions, …
            buffer_seq_dims: for each of them the dimension of its tokens.
            no_restore_buffers: those of ``buffers`` that keep this process's tokens after the block; saves memory.

        Raises:
            InvalidArgument: a buffer cannot be split; then all are as before. Within the block, attention is not what
                can be computed over split sequences, see :func:`.attention.attention`.
        """
        buffers, dims = list(buffers or []), list(buffer_seq_dims or [])
        kept = list(no_restore_buffers or [])
        self._require_splittable(buffers, dims, kept)
        parts = [self.sequences.share(buffer.detach(), dim) for buffer, dim in zip(buffers, dims, strict=True)]
        lengths = {part.shape[dim] for part, dim in zip(parts, dims, strict=True)}
        block = _Block(buffers, parts, self._attention_of(lengths) if self.sequences.size > 1 else None)
        with block.entered(kept):
            yield

    def whole(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of all processes along ``dim``, in the order of the sequence: for outputs of models.

        All processes of the group call it, with shares of one shape and dtype. No gradient flows through it.
        """
        return self.sequences.whole(share, dim, self.group)

    def _attention_of(self, lengths: set[int]) -> Callable[..., torch.Tensor]:
        """Attention that refuses sequences of other than these ``lengths``, if there are any: nobody has split them."""

        def checked(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if lengths and query.shape[-2] not in lengths:
                raise InvalidArgument(
                    f"within context parallelism, attention was called for {query.shape[-2]} tokens here, but the "
                    f"buffers that were split have {' or '.join(map(str, sorted(lengths)))}: these tokens are of no "
                    "split sequence; pass the tensor that they come from in buffers, or call this part of the model "
                    "outside of the block"
                )
            return attention(query, key, value, *args, group=self.group, strategy=self.strategy, **kwargs)

        return checked

    def _require_splittable(self, buffers: list[torch.Tensor], dims: list[int], kept: list[torch.Tensor]) -> None:
        if len(buffers) != len(dims):
            raise InvalidArgument(
                f"context parallelism got {len(buffers)} buffers and {len(dims)} buffer_seq_dims; pass one dimension "
                "for each buffer"
            )
        for index, buffer in enumerate(buffers):
            if not isinstance(buffer, torch.Tensor):
                raise InvalidArgument(
                    f"buffer {index} of context parallelism is a {type(buffer).__name__}; pass tensors"
                )
            if buffer.requires_grad:
                raise InvalidArgument(
                    f"buffer {index} of context parallelism, of shape {tuple(buffer.shape)}, requires a gradient, "
                    "which does not work for a tensor that is split in place; pass the tensors that it was computed "
                    "from, or detach it"
                )
            if any(buffer is other for other in buffers[:index]):
                raise InvalidArgument(
                    f"buffer {index} of context parallelism is the same tensor as an earlier one, and would be split "
                    "twice; pass it once"
                )
        for index, buffer in enumerate(kept):
            if not any(buffer is other for other in buffers):
                raise InvalidArgument(
                    f"no_restore_buffers[{index}] of context parallelism is none of its buffers; pass it in both"
                )
        self.sequences.require_divisible(buffers, dims)


class _Block:
    """What holds within a block, so that recomputation after its end can be within it again."""

    innermost: _Block | None = None

    def __init__(
        self,
        buffers: list[torch.Tensor],
        parts: list[torch.Tensor],
        attention: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._buffers = buffers
        self._parts = parts
        self._attention = attention
        self._ids = {id(buffer) for buffer in buffers}

    @contextmanager
    def entered(self, kept: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Buffers have their parts, and all but ``kept`` what they had before at the end."""
        kept_ids = {id(buffer) for buffer in kept}
        before = [(buffer, buffer.data) for buffer in self._buffers if id(buffer) not in kept_ids]
        outer = _Block.innermost
        try:
            _Block.innermost = self
            for buffer, part in zip(self._buffers, self._parts, strict=True):
                buffer.data = part
            with ExitStack() as stack:
                if self._attention is not None:
                    stack.enter_context(replaced_attention(self._attention))
                    stack.enter_context(recomputed_within(self._resumed))
                if self._buffers:
                    stack.enter_context(saved_as(self._part_of))
                yield
        finally:
            _Block.innermost = outer
            for buffer, whole in before:
                buffer.data = whole

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        if _Block.innermost is self:
            yield
        else:
            with self.entered():
                yield

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory that ``tensor`` has now: a buffer is whole again when a backward pass runs after the block."""
        return tensor.data if id(tensor) in self._ids else tensor
