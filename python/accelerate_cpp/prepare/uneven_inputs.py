"""Training on processes that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.reading import OnUneven

__all__ = ["uneven_inputs"]


@contextmanager
def uneven_inputs(strategy: Strategy, joinables: list[Any], mode: OnUneven) -> Iterator[None]:
    """Inside this block, processes that have more batches than others do what ``mode`` says.

    Args:
        joinables: the prepared models that are trained.
        mode: as ``Accelerator.join_uneven_inputs`` takes it.

    Raises:
        InvalidArgument: ``mode`` is not one of those.
    """
    reading = current.accumulation.reading
    if mode not in get_args(OnUneven):
        raise InvalidArgument(f"mode={mode!r}: expected one of {', '.join(map(repr, get_args(OnUneven)))}")
    before, reading.on_uneven = reading.on_uneven, mode
    try:
        with strategy.join(joinables) if mode == "join" else nullcontext(False) as weighs:
            reading.weighs_rows = weighs
            yield
    finally:
        reading.on_uneven, reading.weighs_rows = before, False
