"""Skipping items of a sampler without creating them, if the sampler allows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate_cpp._native import permuted_indices

Ranges = Sequence[tuple[int, int | None]]
"""Positions ``start`` to ``stop`` of the items to keep, increasing and disjoint; ``stop=None`` is the end."""

# Few enough that the first index comes soon, many enough that slicing costs nothing per index.
_INDICES_PER_SLICE = 4096


def keeping(sampler: Iterable[Any], ranges: Ranges) -> Iterator[Any]:
    """The items of ``sampler`` at the positions in ``ranges``; its state ends as if all of them had been taken.

    O(1) before the first item for sequential samplers and samplers of this package, one permutation for torch's random
    sampler, and a walk over the items for any other. If ``sampler`` is made of batches, every range but the last must
    end where the sampler can continue with full ones.
    """
    if _can_keep(sampler):
        kept: Iterator[Any] = sampler.keeping(ranges)  # type: ignore[attr-defined]
        return kept
    if type(sampler) is SequentialSampler:
        return _of_sequence(range(len(sampler)), ranges)
    if type(sampler) is RandomSampler:
        return random_indices(sampler, sampler.generator, ranges)
    if type(sampler) is BatchSampler:
        return iter(BatchSampler(_Kept(sampler, ranges), sampler.batch_size, sampler.drop_last))
    if isinstance(sampler, Sequence) and type(sampler) in (list, tuple, range):
        return _of_sequence(sampler, ranges)
    return _walked(iter(sampler), ranges)


def _can_keep(sampler: Any) -> bool:
    """Whether ``sampler`` has a ``keeping`` that goes with its ``__iter__``, which a subclass may have changed."""
    owner = next(cls for cls in type(sampler).__mro__ if cls is object or {"__iter__", "keeping"} & vars(cls).keys())
    return "keeping" in vars(owner)


def random_indices(sampler: RandomSampler, generator: torch.Generator | None, ranges: Ranges) -> Iterator[int]:
    """The indices of torch's random ``sampler``, drawn from ``generator``, at the positions in ``ranges``.

    Without a generator, one is created with a seed from torch's, as torch does it.
    """
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(drawn_seed())
    if sampler.replacement:
        yield from _walked(_drawn_with_replacement(sampler, generator), ranges)
        return
    samples, drawn = len(sampler.data_source), sampler.num_samples
    # One permutation more than needed for whole multiples: torch draws it too, and the next pass depends on it.
    for first in range(0, drawn // samples * samples + 1, samples):
        # By a call, so that one permutation is gone before the next one is drawn.
        yield from _of_permutation(_permutation(samples, generator), first, drawn, ranges)


def _permutation(samples: int, generator: torch.Generator) -> torch.Tensor:
    """torch's permutation of the numbers below ``samples``, in 4 bytes each if that suffices.

    On the CPU the numbers are those of ``torch.randperm`` without a dtype; for other devices that is unknown.
    """
    fits = generator.device.type == "cpu" and samples <= torch.iinfo(torch.int32).max
    return torch.randperm(samples, generator=generator, dtype=torch.int32 if fits else torch.int64)


def _of_permutation(permutation: torch.Tensor, first: int, drawn: int, ranges: Ranges) -> Iterator[int]:
    """The indices of ``permutation``, which begins at ``first``, at the positions in ``ranges`` below ``drawn``."""
    length = min(len(permutation), drawn - first)
    for start, stop in ranges:
        end = length if stop is None else min(stop - first, length)
        for position in range(max(0, start - first), end, _INDICES_PER_SLICE):
            yield from permutation[position : min(position + _INDICES_PER_SLICE, end)].tolist()


def permuted(length: int, seed: int, count: int, ranges: Ranges) -> Iterator[int]:
    """Those of ``count`` shuffled indices below ``length`` at the positions in ``ranges``; O(1) before the first.

    Each ``length`` of them are another permutation, computed index by index from ``seed`` (an integer of any size).
    """
    for start, stop in ranges:
        position, end = start, count if stop is None else min(stop, count)
        while position < end:
            turn, first = divmod(position, length)
            last = min(first + _INDICES_PER_SLICE, first + end - position, length)
            yield from permuted_indices(length, seed % 2**64, turn, first, last).tolist()
            position += last - first


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from ``generator``, torch's global one by default, drawn as torch's samplers and loaders draw theirs."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _drawn_with_replacement(sampler: RandomSampler, generator: torch.Generator) -> Iterator[int]:
    drawing = RandomSampler(sampler.data_source, True, sampler._num_samples, generator)
    return iter(drawing)


def _of_sequence(items: Sequence[Any], ranges: Ranges) -> Iterator[Any]:
    return chain.from_iterable(items[start:stop] for start, stop in ranges)


def _walked(items: Iterator[Any], ranges: Ranges) -> Iterator[Any]:
    position = 0
    for start, stop in ranges:
        yield from islice(items, start - position, None if stop is None else stop - position)
        position = start if stop is None else stop


class _Kept:
    """The indices behind a sampler of batches that make up the batches in ``ranges``."""

    def __init__(self, sampler: BatchSampler, ranges: Ranges) -> None:
        size = sampler.batch_size
        self.indices = sampler.sampler
        self.ranges = [(start * size, None if stop is None else stop * size) for start, stop in ranges]

    def __iter__(self) -> Iterator[int]:
        return keeping(self.indices, self.ranges)
