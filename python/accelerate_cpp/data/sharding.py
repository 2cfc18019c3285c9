"""Pure arithmetic of sharding: which indices or samples of one stream each rank sees, and how many of them are real.

Every generator here *returns* (``remainder = yield from …``) the number of real samples in the last global batch if
that batch was completed with samples seen before, and 0 if nothing was added. When the ranks' parts are concatenated in
rank order, the real samples come first, so that dropping the rest leaves every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, TypeVar

from accelerate_cpp.errors import InvalidArgument

T = TypeVar("T")
Batch = Sequence[Any]

_END: Any = object()


def with_last(items: Iterable[T], transform: Callable[[T], T] | None = None) -> Iterator[tuple[T, bool]]:
    """Yields ``(item, is_last)`` by reading one item ahead; ``transform`` is applied before that reading."""
    source = iter(items)
    current = next(source, _END)
    while current is not _END:
        if transform is not None:
            current = transform(current)
        following = next(source, _END)
        yield current, following is _END
        current = following


def rounds(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields lists of ``size`` consecutive items; the last one may be shorter."""
    source = iter(items)
    while chunk := list(islice(source, size)):
        yield chunk


def check_divisible(batch_size: int | None, world_size: int) -> None:
    """Raises ``InvalidArgument`` unless every batch can be cut into ``world_size`` equal parts."""
    if batch_size is None or batch_size % world_size != 0:
        raise InvalidArgument(
            f"split_batches=True cuts every batch into equal parts, one per process: the batch size ({batch_size}) "
            f"needs to be a round multiple of the number of processes ({world_size})"
        )


def slice_batches(
    batches: Iterable[Batch], *, rank: int, world_size: int, batch_size: int, drop_last: bool, even: bool
) -> Generator[Batch, None, int]:
    """Cuts each batch into ``world_size`` slices and yields this rank's (``split_batches=True``).

    A short batch is dropped with ``drop_last``, completed from the first batch with ``even``, and otherwise cut as it
    is, so that the last ranks get less or nothing.
    """
    part = batch_size // world_size
    own = slice(part * rank, part * (rank + 1))
    first: Batch | None = None
    remainder = 0
    for batch in batches:
        first = batch if first is None else first
        remainder = 0
        if len(batch) > batch_size:
            raise InvalidArgument(
                f"the batch sampler returned a batch of {len(batch)} samples, more than its batch_size of {batch_size}"
            )
        if len(batch) == batch_size:
            yield batch[own]
        elif drop_last or len(batch) == 0:
            continue
        elif even:
            remainder = len(batch)
            yield [*batch, *islice(cycle(first), batch_size - len(batch))][own]
        elif len(batch) > own.start:
            yield batch[own]
    return remainder


def deal_batches(
    batches: Iterable[Batch],
    *,
    rank: int,
    world_size: int,
    batch_size: int | None,
    drop_last: bool,
    even: bool,
    completed: list[int] | None = None,
) -> Generator[Batch, None, int]:
    """Distributes whole batches in turn (``split_batches=False``): batch ``i`` goes to rank ``i % world_size``.

    A last round that is not full is dropped with ``drop_last``, completed with the samples of the first round with
    ``even``, and otherwise distributed as it is. ``batch_size=None`` means batches of varying length, which are
    completed by whole batches. The samples of each rank in a round that was completed are added to ``completed``.
    """
    first_round: list[Batch] = []
    for dealt, is_last in with_last(rounds(batches, world_size)):
        first_round = first_round or dealt
        full = len(dealt) == world_size and (batch_size is None or len(dealt[-1]) == batch_size)
        if full or not is_last:
            yield dealt[rank]
        elif drop_last:
            return 0
        elif even:
            whole = _complete_round(dealt, first_round, world_size, batch_size)
            if completed is not None:
                completed += map(len, whole)
            yield whole[rank]
            return sum(map(len, dealt))
        elif rank < len(dealt) and len(dealt[rank]) > 0:
            yield dealt[rank]
    return 0


def _complete_round(
    dealt: list[Batch], first_round: list[Batch], world_size: int, batch_size: int | None
) -> list[Batch]:
    if batch_size is None:
        return list(islice(chain(dealt, cycle(first_round)), world_size))
    spare = cycle(list(chain.from_iterable(first_round)))
    padded = [*dealt, *([()] * (world_size - len(dealt)))]
    return [[*batch, *islice(spare, batch_size - len(batch))] if len(batch) < batch_size else batch for batch in padded]


def shard_length(batches: int, *, rank: int, world_size: int, split: bool, drop_last: bool, even: bool) -> int:
    """How many batches one rank gets of a sampler with ``batches`` batches."""
    if split:
        return batches
    full, rest = divmod(batches, world_size)
    if rest == 0 or drop_last:
        return full
    return full + 1 if even or rank < rest else full


def deal_samples(
    samples: Iterable[T], *, rank: int, world_size: int, global_batch: int, drop_last: bool
) -> Generator[T, None, int]:
    """Reads blocks of ``global_batch`` samples and yields this rank's ``global_batch // world_size`` of each.

    A short last block is dropped with ``drop_last`` and otherwise completed from the first block.
    """
    part = global_batch // world_size
    first: list[T] = []
    for block in rounds(samples, global_batch):
        first = first or block
        missing = global_batch - len(block)
        if missing and drop_last:
            return 0
        whole = [*block, *islice(cycle(first), missing)] if missing else block
        yield from whole[part * rank : part * (rank + 1)]
        if missing:
            return len(block)
    return 0


def samples_per_rank(samples: int, *, world_size: int, global_batch: int, drop_last: bool) -> int:
    """How many samples :func:`deal_samples` yields to each rank of ``samples`` samples."""
    blocks = samples // global_batch if drop_last else -(-samples // global_batch)
    return blocks * (global_batch // world_size)


def dispatch_bounds(sizes: Sequence[int], *, world_size: int, split: bool, complete: bool) -> list[int]:
    """Where to cut what one process read for all: rank ``r`` gets rows ``bounds[r]`` up to ``bounds[r + 1]``.

    Args:
        sizes: rows of each batch read, in order: one batch with ``split``, else up to ``world_size`` batches.
        complete: whether rows may be added to reach a multiple of ``world_size``; if so the last bound may exceed
        ``sum(sizes)``.

    Returns:
        ``world_size + 1`` increasing numbers from 0.
    """
    if not split and len(sizes) == world_size and len(set(sizes)) > 1 and not complete:
        bounds = [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        return bounds
    total = sum(sizes)
    part, rest = divmod(total, world_size)
    if rest and not complete:
        raise InvalidArgument(
            f"a batch of {total} samples cannot be cut into {world_size} equal parts, one per process: make the loader "
            f"return batches whose size is a multiple of {world_size}"
        )
    part += bool(rest)
    return [part * rank for rank in range(world_size + 1)]
