"""Runs drawn programs in the process of a rank, compares them with plain torch, and shrinks one that fails."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from drawn_models import (
    Expected,
    Gradients,
    Model,
    Place,
    Reference,
    clear,
    frozen,
    largest,
    optimizer_of,
    replace_gradients,
    rounding,
    run_backwards,
)
from drawn_programs import Program, Step, draw, shrink, text
from scenarios import outlive_the_others

TIMEOUT = timedelta(seconds=60)
PATIENCE = timedelta(seconds=180)  # of the group that compares: longer than a program waits for a rank that failed


def _close(name: str, own: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    """Both are the same but for rounding, which may come to ``error``."""
    sentence = f"{name}: {own} where {expected} was expected, {error:.2g} more or less"
    assert (own.dtype, own.shape) == (expected.dtype, expected.shape), sentence
    finite = expected.isfinite()
    assert own.isfinite().equal(finite), sentence
    assert not finite.any() or (own[finite].double() - expected[finite].double()).abs().max() <= error, sentence


class Run:
    """A program in our hands, on one rank."""

    def __init__(self, program: Program, place: Place) -> None:
        from accelerate_cpp import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs
        from accelerate_cpp.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.program, self.place = program, place
        torchs = {"find_unused_parameters": True} if dist.get_backend() == "gloo" else {}
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=program.precision,
            kwargs_handlers=[
                DistributedDataParallelKwargs(bucket_cap_mb=program.bucket_cap_mb, **torchs),  # type: ignore[arg-type]
                GradScalerKwargs(init_scale=program.scale),
            ],
        )
        torch.manual_seed(program.seed + place.rank)  # the weights of rank 0 count
        self.bare = Model(program)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer_of(program, self.bare))

    def _look(self, moment: str, how_much: int, expected: Gradients) -> None:
        """Compares gradients. More are not read, as the package trusts those that nobody has seen."""
        names = dict(self.bare.named_parameters())
        for name in list(names)[-1 if how_much == 1 else 0 :] if how_much else ():
            own, value = names[name].grad, expected.values[name]
            assert (own is None) == (value is None), f"{moment}, {name}: {own} where {value} was expected"
            if own is not None and value is not None:
                _close(f"{moment}, {name}.grad", own, value, expected.errors[name])

    def _pass(self, number: int, index: int, expected: list[Gradients]) -> None:
        """Runs a pass, whose backward passes have to come to the first ones of ``expected``, which it takes away."""
        step = self.program.steps[number]
        one = step.passes[index]
        weight = self.place.of(one.weights, None)

        def backward(loss: Any, retain_graph: bool) -> None:
            if one.plain:
                loss = loss / self.accelerator.gradient_accumulation_steps
                scaler = self.accelerator.scaler
                (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=retain_graph)
            else:
                self.accelerator.backward(loss, weight=weight, retain_graph=retain_graph)
            self._look(f"step {number}, pass {index}", self.place.of(one.looks, 2), expected.pop(0))

        with ExitStack() as stack:
            if step.accumulate:
                stack.enter_context(self.accelerator.accumulate(self.model))
            elif one.local:
                stack.enter_context(self.accelerator.no_sync(self.model))
            run_backwards(self.program, self.place, self.model, self.bare, (number, index), backward)

    def step(self, number: int, expected: Expected) -> None:
        """Runs a step and compares it."""
        step = self.program.steps[number]
        self.accelerator.gradient_accumulation_steps = len(step.passes) if step.accumulate else 1
        self.accelerator.step = 0
        with frozen(self.bare, step.frozen):
            for index in range(len(step.passes)):
                self._pass(number, index, expected.passes)
            self._finish(step, f"step {number}", expected)
        clear(self.optimizer, step.clear)

    def _finish(self, step: Step, moment: str, expected: Expected) -> None:
        replace_gradients(step, self.place, self.bare)
        if expected.norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), step.max_norm)
            error = expected.norm_error + rounding(norm.dtype) * largest(norm)
            _close(f"{moment}, norm", norm, expected.norm.to(norm.dtype), error)
        else:
            self.accelerator.unscale_gradients()
        self._look(f"{moment}, after clipping", self.place.of(step.looks, 2), expected.clipped)
        self.optimizer.step()
        skipped = self.accelerator.optimizer_step_was_skipped
        assert skipped == expected.skipped, f"{moment}: skipped is {skipped} where {expected.skipped} was expected"
        if self.accelerator.scaler is not None:
            scale = self.accelerator.scaler.get_scale()
            assert scale == expected.scale, f"{moment}: a scale of {scale} where {expected.scale} was expected"
        for name, parameter in self.bare.named_parameters():
            _close(f"{moment}, {name}", parameter.detach(), expected.parameters[name], expected.parameter_errors[name])

    def digest(self) -> int:
        """Of the bits of all parameters."""
        found = hashlib.sha256()
        for parameter in self.bare.parameters():
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(found.digest()[:7], "big")


def run_program(program: Program, place: Place) -> str:
    """What differed on this rank, or another, in the first step in which anything did; empty if nothing. Collective."""
    reference = Reference(program, place)
    run: Run | None = None
    for number in range(len(program.steps)):
        expected = reference.step(number)
        failure = ""
        try:
            run = run or Run(program, place)
            run.step(number, expected)
        except Exception:
            failure = traceback.format_exc(limit=-4)
        if place.any([bool(failure)])[0]:
            return failure or "another rank failed"
        assert run is not None
        lowest, highest = (
            place.all_reduce(torch.tensor([run.digest()]), op).item() for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        )
        if lowest != highest:
            return f"step {number}: the ranks have parameters of different bits"
        reference.follow(run.bare, run.optimizer)
    return ""


def _reference_group(way: str, store: Any, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="cable" if way == "hosts" else "lo")]
    options._threads = 2
    options._timeout = PATIENCE
    return gloo(dist.PrefixStore("reference", store), rank, size, options)


def _patched(way: str) -> Any:
    """What makes this machine what a way needs.

    With "apart", ranks take each other for ranks of other hosts, so that ours goes over Gloo; with "device", gradients
    are summed by a process group, as on accelerators.
    """
    if way == "apart":
        return mock.patch("accelerate_cpp.comm.hosts.find_hosts", lambda store, rank, size, numbers: list(range(size)))
    if way == "device":
        make = partial(dist.new_group, backend="gloo")
        return mock.patch("accelerate_cpp.parallel.data_parallel_strategy.device_group_maker", return_value=make)
    return nullcontext()


class Programs:
    """Runs one program after the other, each in a default process group of its own."""

    def __init__(self, way: str, store: Any, rank: int, size: int) -> None:
        self.way, self.store = way, store
        self.place = Place(rank, size, _reference_group(way, store, rank, size))
        self._count = 0

    def failure(self, program: Program) -> str:
        """As :func:`run_program`. Collective."""
        from accelerate_cpp.comm.backend import register

        register()
        self._count += 1
        with _patched(self.way):
            dist.init_process_group(
                "gloo" if self.way == "torch" else "cpu:shm",
                store=dist.PrefixStore(f"program {self._count}", self.store),
                rank=self.place.rank,
                world_size=self.place.size,
                timeout=TIMEOUT,
            )
            try:
                return run_program(program, self.place)
            finally:
                self.place.any([True])
                dist.destroy_process_group()

    def smallest_failure(self, program: Program) -> tuple[str, str]:
        """How the smallest program found fails, and its text. Collective."""
        small = shrink(program, lambda candidate: bool(self.failure(candidate)))
        return self.failure(small), f"seed {program.seed}; the smallest program that fails:\n{text(small)}"


def run_on_this_rank(
    way: str, first_seed: int, count: int, only: Program | None, enter: Callable[[int], None]
) -> tuple[str, str]:
    """How the first of ``count`` programs that fails, or ``only`` one, does so, and its text; empty if none fails.

    Args:
        way: shm, apart, device, torch or hosts.
        enter: called with the rank before anything else.
    """
    enter(int(os.environ["RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    programs = Programs(way, store, rank, size)
    drawn = [only] if only else [draw(first_seed + number, size, of_torch=way == "torch") for number in range(count)]
    report = ("", "")
    for program in drawn:
        print(f"seed {program.seed} over {way} with {size} ranks", flush=True)  # to be read if a rank dies
        if programs.failure(program):
            report = programs.smallest_failure(program)
            break
    outlive_the_others(store, rank, size)
    return report
