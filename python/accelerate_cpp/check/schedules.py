"""Checks whether learning-rate schedules end with the run."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import lr_scheduler

from accelerate_cpp.check.loading import configured_length
from accelerate_cpp.check.observed import Observed, Pass
from accelerate_cpp.check.source import here

_EARLY, _LATE = 0.9, 1.3  # parts of the run outside of which the end of a schedule is considered a mistake


def total_steps(scheduler: Any) -> int | None:
    """The number of steps after which a schedule has ended; ``None`` if it is unknown, or never ends."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = total_steps(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, lr_scheduler.PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, lr_scheduler.LinearLR):  # upwards it is a warm-up, after which the rate stays
        return int(scheduler.total_iters) if scheduler.end_factor < scheduler.start_factor else None
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        return _steps_of_lambda(scheduler.lr_lambdas[0])
    return None


def _steps_of_lambda(function: Any) -> int | None:
    """The steps of the schedules of the library transformers, which are partial functions."""
    steps = function.keywords.get("num_training_steps") if isinstance(function, partial) else None
    return steps if isinstance(steps, int) else None


class Schedules:
    """Watches the steps of schedulers, prepared or not."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._stepped: list[Any] = []
        self._where: dict[int, str] = {}
        self._within: dict[int, dict[int, int]] = {}
        self._outside: dict[int, int] = {}

    def step(self, scheduler: Any, by_prepared: bool) -> None:
        """A torch scheduler steps; ``by_prepared`` if what ``prepare`` returned for it does."""
        if not any(scheduler is known for known in self._stepped):
            self._stepped.append(scheduler)
            self._where[id(scheduler)] = here()
            self._within[id(scheduler)], self._outside[id(scheduler)] = {}, 0
            if not by_prepared and self._observed.accelerators:
                self._judge_unprepared(scheduler)
        training = next((one for one in reversed(self._observed.reading) if one.backwards or one.steps), None)
        reading = self._observed.reading[-1] if self._observed.reading else training
        if reading is None:
            self._outside[id(scheduler)] += 1
        else:
            within = self._within[id(scheduler)]
            within[id(reading)] = within.get(id(reading), 0) + 1

    def _judge_unprepared(self, scheduler: Any) -> None:
        observed = self._observed
        accelerator = observed.accelerators[-1]
        if any(scheduler is known for known in accelerator._custom_objects):
            return
        what = f"{type(scheduler).__name__} has not been prepared: save_state leaves it out"
        level = "warning"
        if observed.accumulation_steps > 1:
            what += f", and it does not wait for the {observed.accumulation_steps} micro-batches of a step"
        elif accelerator.scaler is not None:
            what += ", and it goes on when fp16 leaves out a step"
        observed.find(level, "unprepared-scheduler", what, "pass it to prepare, and step what that returns")

    def conclude(self) -> None:
        """Compares each schedule with the run, if the script shows how long that is."""
        for scheduler in self._stepped:
            total = total_steps(scheduler)
            reading = next((one for one in self._observed.passes if one.trains and one.steps), None)
            if total is not None and reading is not None:
                self._judge(scheduler, total, reading)

    def _judge(self, scheduler: Any, total: int, reading: Pass) -> None:
        per_pass = self._steps_per_pass(scheduler, reading)
        if not per_pass:
            return
        passes = reading.repetitions
        name, where = type(scheduler).__name__, self._where[id(scheduler)]
        length = f"{name} has {total} steps, and takes {per_pass:g} of them in a pass over the data"
        if passes is None:
            if total < _EARLY * per_pass:
                self._report("schedule-ends-early", f"{length}: it ends within the first one", where)
            return
        part = total / (per_pass * passes)
        run = f"{length}, {per_pass * passes:g} in the {passes} pass{'es' if passes > 1 else ''} of the run"
        if part < _EARLY:
            self._report("schedule-ends-early", f"{run}: it ends after {part:.0%} of it", where)
        elif part > _LATE:
            self._report("schedule-too-long", f"{run}: the run ends after {1 / part:.0%} of it", where)

    def _steps_per_pass(self, scheduler: Any, reading: Pass) -> float:
        """Steps of all configured processes, scaled from what was counted to a pass that is not cut short."""
        task = self._observed.task
        prepared = [known for known in self._observed.prepared("schedulers") if known.scheduler is scheduler]
        grows = task.configured / task.processes if prepared and not prepared[0].split_batches else 1.0
        within = self._within[id(scheduler)].get(id(reading), 0)
        length = configured_length(reading.loader, task)
        if within and (length is None or not reading.batches):
            return 0.0
        steps = within * grows * (length or 0) / max(1, reading.batches)
        return steps + self._outside[id(scheduler)] * grows

    def _report(self, code: str, what: str, where: str) -> None:
        advice = "count the steps of the schedule in batches of the loader before prepare, over the accumulation steps"
        if self._observed.is_distributed:
            advice += "; a prepared scheduler takes one for each process in each optimizer step, unless split_batches"
        self._observed.find("warning", code, what, advice, where)
