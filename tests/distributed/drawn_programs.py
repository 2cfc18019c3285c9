"""Training programs that are drawn from a seed: what they are, how they read, and what a smaller one is.

A program says everything that may matter to the averaging of gradients, to clipping and to the loss scaler, for all
ranks. Its text is a Python expression, from which :func:`parse` makes it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import islice, pairwise
from typing import Any

HEAD = "head"  # the last layer, which every rank uses in every pass


@dataclass(frozen=True)
class Branch:
    """A part of the model whose result is added to its input. Tied ones compute with the weights of another."""

    name: str
    kind: str = "linear"  # tied, withheld (autograd may have no gradient for its weight), embedding, scale
    width: int = 1
    dtype: str = "float32"
    checkpoint: str = ""  # reentrant, plain
    tied_to: str = ""


@dataclass(frozen=True)
class Pass:
    """Forward passes, and the backward passes of their losses. What is in tuples is by rank; empty ones are for none.

    Attributes:
        local: within ``no_sync``.
        forwards: how many forward passes come first.
        backwards: one of the "sum" of the losses, one for "each", or two of one forward pass, which is "retained".
        unused: branches that the forward passes leave out.
        withheld: branches for whose weight autograd has no gradient.
        frozen: parameters that require no gradient from after the forward until after the backward passes.
        weights: of the losses, which are sums then.
        looks: what the program reads after the pass: no gradient (0), one (1) or all (2).
        overflow: the rank whose loss is infinite.
        plain: by ``loss.backward()``, which the package is not told of.
    """

    local: bool = False
    forwards: int = 1
    backwards: str = "sum"
    unused: tuple[tuple[str, ...], ...] = ()
    withheld: tuple[tuple[str, ...], ...] = ()
    frozen: tuple[tuple[str, ...], ...] = ()
    weights: tuple[float, ...] = ()
    looks: tuple[int, ...] = ()
    overflow: int | None = None
    plain: bool = False


@dataclass(frozen=True)
class Step:
    """Passes and a step of the optimizer.

    Attributes:
        accumulate: by ``accumulate()``, with all passes but the last one local; else by ``no_sync`` where passes ask.
        frozen: parameters that require no gradient, on all ranks.
        replaced: ranks that replace gradients by copies after the last pass.
        doubled: gradients are multiplied by two then, on all ranks.
        max_norm: what they are clipped to then.
        looks: as those of passes, after clipping.
        clear: after the step gradients are "dropped", "zeroed" or "kept".
    """

    passes: tuple[Pass, ...] = (Pass(),)
    accumulate: bool = False
    frozen: tuple[str, ...] = ()
    replaced: tuple[int, ...] = ()
    doubled: bool = False
    max_norm: float | None = None
    looks: tuple[int, ...] = ()
    clear: str = "dropped"


@dataclass(frozen=True)
class Program:
    """``seed`` is that of the data and the first weights, too; ``rows`` is by rank."""

    seed: int
    ranks: int
    branches: tuple[Branch, ...] = ()
    steps: tuple[Step, ...] = (Step(),)
    width: int = 1
    rows: tuple[int, ...] = field(default=())
    precision: str = "no"
    scale: float = 8.0
    momentum: float = 0.0
    bucket_cap_mb: float = 25.0


def text(value: Any, indent: str = "") -> str:
    """The expression that makes a program, or a part of one; what is as by default is left out."""
    if is_dataclass(value):
        names = [one.name for one in fields(value) if getattr(value, one.name) != one.default]
        inner = ", ".join(f"{name}={text(getattr(value, name), indent)}" for name in names)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        lines = "".join(f"\n{indent}  {text(one, indent + '  ')}," for one in value)
        return f"({lines}\n{indent})"
    return repr(value)


def parse(expression: str) -> Program:
    """The program that :func:`text` has written."""
    known = {kind.__name__: kind for kind in (Program, Step, Pass, Branch)}
    program = eval(expression, {"__builtins__": {}}, known)
    assert isinstance(program, Program)
    return program


def parameters_of(branch: Branch) -> list[str]:
    """The names of the parameters that are a branch's own."""
    if branch.kind == "linear":
        return [f"branches.{branch.name}.{part}" for part in ("into.weight", "into.bias", "out.weight", "out.bias")]
    return [] if branch.kind == "tied" else [f"branches.{branch.name}.weight"]


class _Dice:
    """Draws a program. Torch's own wrapper takes fewer than ours: see the note of :func:`draw`."""

    def __init__(self, seed: int, ranks: int, of_torch: bool) -> None:
        self.random = random.Random(f"{seed} {ranks}")
        self.seed, self.ranks, self.of_torch = seed, ranks, of_torch
        self.branches: tuple[Branch, ...] = ()
        self.precision = "no"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def some(self, names: list[str], probability: float) -> tuple[str, ...]:
        return tuple(name for name in names if self.chance(probability))

    def by_rank(self, one: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(one() for _ in range(self.ranks))

    def branch(self, number: int) -> Branch:
        kind = self.random.choice(["linear", "linear", "linear", "tied", "withheld", "embedding", "scale"])
        linear = [one for one in self.branches if one.kind == "linear" and one.checkpoint != "reentrant"]
        if kind == "tied" and linear:
            other = self.random.choice(linear)
            return Branch(f"b{number}", kind, other.width, other.dtype, self.random.choice(["", "plain"]), other.name)
        kind = "linear" if kind == "tied" else kind
        width = self.random.choice([1, 2, 3, 5, 8, 33])
        dtype = self.random.choice(["float32", "float32", "float32", "bfloat16", "float64"])
        return Branch(f"b{number}", kind, width, dtype, "" if kind == "embedding" else self.checkpoint())

    def checkpoint(self) -> str:
        return self.random.choice(["", "", "", "plain", "" if self.of_torch else "reentrant"])

    def has_reentrant(self) -> bool:
        return any(branch.checkpoint == "reentrant" for branch in self.branches)

    def may_freeze(self) -> list[str]:
        """What may be frozen between forward and backward: what plain checkpointing recomputes has to be as it was."""
        checkpointed = [branch for branch in self.branches if branch.checkpoint == "plain"]
        plain = {name for branch in checkpointed for name in (branch.name, branch.tied_to)}
        return [f"{HEAD}.bias"] + [
            name for branch in self.branches if branch.name not in plain for name in parameters_of(branch)
        ]

    def one_pass(self, local: bool, weighted: bool) -> Pass:
        names = [branch.name for branch in self.branches]
        custom = [branch.name for branch in self.branches if branch.kind == "withheld"]
        several = not self.of_torch and self.chance(0.3)
        choices = ([] if self.has_reentrant() else ["sum"]) + ([] if weighted else ["each", "retained"])
        backwards = self.random.choice(choices) if several and choices else "sum"
        several = several and bool(choices)
        freezes = not self.of_torch and self.chance(0.2)
        weights = self.by_rank(lambda: self.random.choice([0.0, 1.0, 2.5, 7.0])) if weighted else ()
        return Pass(
            local=local,
            forwards=self.random.choice([2, 3]) if several and backwards != "retained" else 1,
            backwards=backwards,
            unused=self.by_rank(lambda: self.some(names, 0.3)) if self.chance(0.6) else (),
            withheld=self.by_rank(lambda: self.some(custom, 0.5)) if custom else (),
            frozen=self.by_rank(lambda: self.some(self.may_freeze(), 0.15)) if freezes else (),
            weights=weights if not weights or sum(weights) > 0 else (1.0, *weights[1:]),
            looks=self.by_rank(lambda: self.random.choice([0, 0, 1, 2])),
            overflow=self.random.randrange(self.ranks) if self.precision == "fp16" and self.chance(0.15) else None,
            plain=not weighted and not self.has_reentrant() and self.chance(0.2),
        )

    def step(self, kept: bool) -> Step:
        """``kept``: gradients of the step before are still there, to which weighted ones cannot be added."""
        weighted = not kept and self.chance(0.25)
        count = self.random.choice([1, 1, 2, 3])
        accumulate = weighted or self.chance(0.3)
        local = [number < count - 1 and (accumulate or self.chance(0.6)) for number in range(count)]
        everything = [name for branch in self.branches for name in parameters_of(branch)]
        clears = ["dropped", "dropped", "zeroed", "kept"]
        return Step(
            passes=tuple(self.one_pass(one, weighted) for one in local),
            accumulate=accumulate,
            frozen=self.some(everything, 0.3) if self.chance(0.2) else (),
            replaced=tuple(rank for rank in range(self.ranks) if self.chance(0.5)) if self.chance(0.2) else (),
            doubled=self.chance(0.15),
            max_norm=self.random.choice([0.01, 0.3, 1000.0]) if self.chance(0.6) else None,
            looks=self.by_rank(lambda: self.random.choice([0, 0, 1, 2])),
            clear=self.random.choice(clears[:3] if self.precision == "fp16" or weighted else clears),
        )

    def program(self) -> Program:
        for number in range(self.random.choice([1, 2, 3, 4, 6])):
            self.branches += (self.branch(number),)
        self.precision = self.random.choice(["no", "no", "bf16", "fp16"])
        steps: list[Step] = []
        for _ in range(self.random.choice([3, 4, 6])):
            steps.append(self.step(bool(steps) and steps[-1].clear == "kept"))
        return Program(
            seed=self.seed,
            ranks=self.ranks,
            branches=self.branches,
            steps=tuple(steps),
            width=self.random.choice([1, 2, 3, 5, 17]),
            rows=self.by_rank(lambda: self.random.choice([1, 2, 3, 4])),
            precision=self.precision,
            scale=self.random.choice([1.0, 8.0, 1024.0]),
            momentum=self.random.choice([0.0, 0.9]),
            bucket_cap_mb=self.random.choice([25.0, 0.0005, 0.0001, 0.00001]),
        )


def draw(seed: int, ranks: int, of_torch: bool = False) -> Program:
    """The program of this seed.

    Args:
        of_torch: without what torch's own wrapper refuses or leaves local while it looks for unused parameters: several
            forward passes before a backward pass, several backward passes of one forward pass, reentrant checkpointing,
            and freezing between forward and backward.
    """
    return _Dice(seed, ranks, of_torch).program()


def _without(program: Program, name: str) -> Program:
    """The program without a branch and those that are tied to it."""
    gone = {branch.name for branch in program.branches if name in (branch.name, branch.tied_to)}
    lost = {parameter for branch in program.branches if branch.name in gone for parameter in parameters_of(branch)}

    def rest(by_rank: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        left = tuple(tuple(one for one in names if one not in gone | lost) for names in by_rank)
        return left if any(left) else ()

    steps = [
        replace(
            step,
            frozen=tuple(one for one in step.frozen if one not in lost),
            passes=tuple(
                replace(one, unused=rest(one.unused), withheld=rest(one.withheld), frozen=rest(one.frozen))
                for one in step.passes
            ),
        )
        for step in program.steps
    ]
    left = tuple(branch for branch in program.branches if branch.name not in gone)
    return replace(program, branches=left, steps=tuple(steps))


def _with_defaults(value: Any, keep: tuple[str, ...]) -> Iterator[Any]:
    """``value`` with one more field as by default."""
    for one in fields(value):
        if one.name not in keep and getattr(value, one.name) != one.default:
            yield replace(value, **{one.name: one.default})


def _smaller_passes(step: Step) -> Iterator[Step]:
    for number, one in enumerate(step.passes):
        before, after = step.passes[:number], step.passes[number + 1 :]
        if after:
            yield replace(step, passes=before + after)
        elif before:
            yield replace(step, passes=(*before[:-1], replace(before[-1], local=False)))
        weighted = ("weights",) if one.weights else ()  # all passes of a step have weights or none has
        local = ("local",) if step.accumulate else ()
        for smaller in [*_with_defaults(one, (*weighted, *local)), *_for_fewer_ranks(one)]:
            yield replace(step, passes=(*before, smaller, *after))
    if step.passes[0].weights:
        yield replace(step, passes=tuple(replace(one, weights=()) for one in step.passes))


def _for_fewer_ranks(one: Pass) -> Iterator[Pass]:
    for name in ("unused", "withheld", "frozen"):
        by_rank = getattr(one, name)
        for rank, names in enumerate(by_rank):
            for gone in names:
                left = tuple(other for other in names if other != gone)
                yield replace(one, **{name: (*by_rank[:rank], left, *by_rank[rank + 1 :])})
    for rank, look in enumerate(one.looks):
        if look:
            yield replace(one, looks=(*one.looks[:rank], look - 1, *one.looks[rank + 1 :]))


def is_allowed(program: Program) -> bool:
    """Whether a program does nothing that the package, or torch, refuses.

    Weighted gradients are not added to those that a step before has kept; infinite losses need a loss scaler; and with
    reentrant checkpointing a parameter has one gradient in a backward pass, of which the package is told.
    """
    if any(first.clear == "kept" and second.passes[0].weights for first, second in pairwise(program.steps)):
        return False
    passes = [one for step in program.steps for one in step.passes]
    if program.precision != "fp16" and any(one.overflow is not None for one in passes):
        return False
    unfit = any(one.plain or (one.forwards > 1 and one.backwards == "sum") for one in passes)
    return not unfit or all(branch.checkpoint != "reentrant" for branch in program.branches)


def smaller(program: Program) -> Iterator[Program]:
    """Programs that have a step, a branch, a pass or another ingredient less, what shortens most first."""
    return filter(is_allowed, _smaller(program))


def _smaller(program: Program) -> Iterator[Program]:
    for number in range(len(program.steps) if len(program.steps) > 1 else 0):
        yield replace(program, steps=program.steps[:number] + program.steps[number + 1 :])
    for branch in program.branches:
        yield _without(program, branch.name)
    yield from _with_defaults(program, ("seed", "ranks", "branches", "steps"))
    for number, step in enumerate(program.steps):
        weighted = ("accumulate",) if step.passes[0].weights or any(one.local for one in step.passes) else ()
        for less in [*_smaller_passes(step), *_with_defaults(step, ("passes", *weighted))]:
            yield replace(program, steps=(*program.steps[:number], less, *program.steps[number + 1 :]))
    for number, branch in enumerate(program.branches):
        tied = branch.kind == "tied" or any(branch.name == other.tied_to for other in program.branches)
        keep = ("name", "kind", "tied_to", *(("width", "dtype") if tied else ()))
        for plain in _with_defaults(branch, keep):
            yield replace(program, branches=(*program.branches[:number], plain, *program.branches[number + 1 :]))


def shrink(program: Program, fails: Callable[[Program], bool], most_runs: int = 400) -> Program:
    """The smallest program found that ``fails`` still, by leaving out one thing after the other."""
    found = True
    while found:
        found, place = False, 0
        while (candidate := next(islice(smaller(program), place, None), None)) is not None:
            if most_runs == 0:
                return program
            most_runs -= 1
            if fails(candidate):
                program, found = candidate, True
            else:
                place += 1
    return program
