"""Passes over loaders: where a check cuts them short, and whether the data is divided as it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accelerate_cpp.check.observed import CheckFinished, Observed, Pass
from accelerate_cpp.check.source import here, repetitions, user_frame
from accelerate_cpp.runtime import current

_PASSES_WITHOUT_TRAINING = 50  # over one loader, after which the script is assumed to continue like this
_MICRO_BATCHES_PER_STEP = 64  # of a script that counts them itself


class Loading:
    """Watches passes over loaders, prepared or not."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._latest: Pass | None = None

    def watched(self, loader: Any, batches: Iterator[Any], is_prepared: bool) -> Iterator[Any]:
        """``batches`` of one pass over ``loader``, up to what a check needs."""
        reading = self._begin(loader, is_prepared)
        self._observed.reading.append(reading)
        try:
            while not self._has_enough(reading):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                reading.batches += 1
                yield batch
            reading.was_cut = True
        finally:
            self._count(reading)
            self._observed.reading.remove(reading)
            self._latest = reading
            if hasattr(batches, "close"):
                batches.close()

    def gathers(self, name: str) -> None:
        """A method of the ``Accelerator`` gathers results of the current batch, or of all batches."""
        reading = self._observed.reading[-1] if self._observed.reading else self._latest
        if reading is not None:
            self._count(reading)
            reading.gathers.setdefault(name, here())

    def prepares(self, loader: Any) -> None:
        """``loader`` is given to ``prepare``."""
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            self._observed.find(
                "error",
                "sharded-twice",
                f"the loader that is prepared has a DistributedSampler for {sampler.num_replicas} processes, and "
                "prepare shares out what is left: most of the data is never read",
                "leave out the DistributedSampler; prepare does its work",
            )

    def conclude(self) -> None:
        """The findings about passes, once for each loader, from its most informative pass."""
        for reading in self._observed.reading:
            self._count(reading)
        seen: list[Any] = []
        for reading in sorted(self._observed.passes, key=lambda one: not one.gathers):
            if any(reading.loader is loader for loader in seen):
                continue
            seen.append(reading.loader)
            if reading.is_prepared:
                self._judge_tail(reading)
                self._judge_accumulation(reading)
            elif self._observed.is_distributed and self._observed.accelerators:
                self._judge_unprepared(reading)

    def _begin(self, loader: Any, is_prepared: bool) -> Pass:
        observed = self._observed
        before = [one for one in observed.passes if one.loader is loader]
        for one in before:
            if one.was_cut and one.trains:
                raise CheckFinished("the second pass over a loader that is trained on begins")
        if len(before) >= _PASSES_WITHOUT_TRAINING:
            raise CheckFinished(f"pass {len(before) + 1} over a loader begins")
        frame = user_frame()
        reading = Pass(loader, is_prepared, here(), repetitions(frame), observed.steps, observed.backwards)
        if not before:
            observed.journal.write(
                "loader",
                length=_length(loader),
                where=reading.where,
                prepared=is_prepared,
                joins=current.accumulation.reading.on_uneven is not None,
            )
        observed.passes.append(reading)
        return reading

    def _count(self, reading: Pass) -> None:
        reading.steps = self._observed.steps - reading.first_step
        reading.backwards = self._observed.backwards - reading.first_backward

    def _has_enough(self, reading: Pass) -> bool:
        self._count(reading)
        steps = self._observed.task.steps
        if reading.trains:
            most = steps * max(self._observed.accumulation_steps, _MICRO_BATCHES_PER_STEP)
            return reading.steps >= steps or reading.batches >= most
        return reading.batches >= steps

    def _judge_tail(self, reading: Pass) -> None:
        observed, loader = self._observed, reading.loader
        rest, whole = remainder(loader, observed.task)
        if not rest:
            return
        if loader._drops_incomplete():
            observed.find(
                "note",
                "uneven-tail",
                f"the last {rest} samples of {_samples(loader)} are left out of each pass",
                "this is what drop_last asks for",
                reading.where,
            )
            return
        repeated = whole - rest
        what = (
            f"{_samples(loader)} samples are not a multiple of {whole}, the samples of all processes in one step: "
            f"{repeated} of them {'is' if repeated == 1 else 'are'} repeated to complete the last one"
        )
        gathers = set(reading.gathers)
        if not reading.trains and "gather_for_metrics" in gathers:
            return  # it leaves the repeated samples out
        if gathers and not reading.trains:
            name = sorted(gathers)[0]
            observed.find(
                "warning",
                "gather-on-uneven-tail",
                f"{what}, and {name} counts them twice in metrics",
                "call gather_for_metrics, which leaves the repeated ones out",
                reading.gathers[name],
            )
        elif observed.task.configured > 1:
            observed.find(
                "note",
                "uneven-tail",
                what,
                "drop_last=True, or even_batches=False with join_uneven_inputs, changes that",
                reading.where,
            )

    def _judge_accumulation(self, reading: Pass) -> None:
        observed, steps = self._observed, self._observed.accumulation_steps
        length = configured_length(reading.loader, observed.task)
        if reading.trains and observed.accumulates and length is not None and length % steps:
            observed.find(
                "note",
                "short-accumulation",
                f"a pass has {length} batches, not a multiple of {steps}: the last "
                f"step of each has {length % steps} of them, and still divides by {steps}",
                "choose a number of batches that the steps divide, or pass backward a weight",
                reading.where,
            )

    def _judge_unprepared(self, reading: Pass) -> None:
        loader = reading.loader
        if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
            return
        processes = self._observed.task.configured
        what = f"the loader has not been prepared: each of {processes} processes reads all of the data"
        advice = "pass it to prepare, and loop over what that returns"
        if reading.trains:
            self._observed.find("error", "unprepared-loader", what, advice, reading.where)
        elif reading.gathers:
            what = f"{what}, and {sorted(reading.gathers)[0]} counts every sample as often"
            self._observed.find("warning", "unprepared-loader", what, advice, reading.where)


def _length(loader: Any) -> int | None:
    with suppress(TypeError):
        return len(loader)
    return None


def _samples(loader: Any) -> int:
    return int(loader.total_dataset_length)


def _growth(loader: Any, task: Any) -> float:
    """By how much a global batch is larger in the configured run than in the check."""
    return 1.0 if loader.batches_per_step == 1 else task.configured / task.processes


def remainder(loader: Any, task: Any) -> tuple[int, int]:
    """Samples of a prepared loader in the last step of all configured processes, and in the others; 0 if unknown."""
    whole = loader.total_batch_size
    try:
        samples = _samples(loader)
    except TypeError:
        return 0, 0
    if not whole:
        return 0, 0
    whole = round(whole * _growth(loader, task))
    return samples % whole, whole


def configured_length(loader: Any, task: Any) -> int | None:
    """Batches of a pass of each configured process."""
    length = _length(loader)
    if length is None or not hasattr(loader, "batches_per_step"):
        return length
    return math.ceil(length / _growth(loader, task))
