"""How loaders behave when some processes have fewer batches than others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate_cpp.data import loaders
from accelerate_cpp.data.samplers import BatchSamplerShard
from accelerate_cpp.errors import InvalidArgument


def while_all_have_some(
    batches: Iterator[tuple[Any, bool]], who_has: Callable[[bool], list[bool]], raises: bool
) -> Iterator[tuple[Any, bool, bool]]:
    """The batches that all processes have.

    Args:
        batches: the batches of this process, each with whether it is the last.
        who_has: a collective that takes whether this process has one more batch, and returns the answers of all ranks.
        raises: raise, instead of ending, when only some have no more.

    Yields:
        A batch, whether it is the last one here, and whether that is because another process has no more.

    Raises:
        InvalidArgument: on every process.
    """
    held, count = next(batches, None), 0
    having = who_has(held is not None)
    while held is not None and all(having):
        following = next(batches, None)
        having, count = who_has(following is not None), count + 1
        batch, is_last = held
        cut = not raises and not all(having) and not is_last
        yield batch, is_last or cut, cut
        held = following
    if raises and any(having):
        absent, present = (_names(having, wanted) for wanted in (False, True))
        raise InvalidArgument(
            f"{absent} had {count} batches, and {present} had more; give all processes the same number "
            "(even_batches=True), or choose join_uneven_inputs(mode='join') or 'stop'"
        )


def while_any_has_some(
    batches: Iterator[tuple[Any, bool]],
    who_has: Callable[[bool], list[bool]],
    first_of: Callable[[int, Any], Any],
) -> Iterator[tuple[Any, bool, bool, int]]:
    """The batches of this process, and its last one again for as long as another process has more.

    Args:
        batches: the batches of this process, each with whether it is the last.
        who_has: a collective that takes whether this process has one more batch, and returns the answers of all ranks.
        first_of: a collective that takes a rank and what this process has, and returns what that rank has; for those
            that have no batch at all.

    Yields:
        A batch, whether all processes have had their last one with it, whether it is repeated, and the first rank where
        it is not.
    """
    held = next(batches, None)
    having = who_has(held is not None)
    batch = None if held is None else held[0]
    if any(having) and not all(having):
        foreign = first_of(having.index(True), batch)
        batch = foreign if held is None else batch
    while any(having):
        first = having.index(True)
        following = None if held is None else next(batches, None)
        having = who_has(following is not None)
        yield batch, not any(having), held is None, first
        held = following
        batch = batch if held is None else held[0]


def _names(having: list[bool], wanted: bool) -> str:
    return ", ".join(f"rank {rank}" for rank, has in enumerate(having) if has is wanted)


@contextmanager
def overriding_even_batches(prepared: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Inside this block, map-style loaders complete their last global batch, or do not; ``None`` has no effect."""
    shards = [loaders.shard_of(loader) for loader in prepared] if even_batches is not None else []
    before = [(shard, shard.even_batches) for shard in shards if isinstance(shard, BatchSamplerShard)]
    if len(before) < len(shards):
        warnings.warn("even_batches is for map-style datasets; other loaders are left as they are", stacklevel=4)
    try:
        for shard, _ in before:
            shard.even_batches = bool(even_batches)
        yield
    finally:
        for shard, previous in before:
            shard.even_batches = previous
