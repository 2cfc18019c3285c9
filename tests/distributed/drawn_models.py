"""The model of a drawn program, its data, and training it in plain torch with one all-reduce for each gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from drawn_programs import Branch, Pass, Program, Step

WORDS, OUTPUTS, LEARNING_RATE = 7, 3, 0.05
COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Scaled(torch.autograd.Function):
    """A product with a weight, for which autograd has no gradient while ``leaves_out()``."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, weight: torch.Tensor, leaves_out: Callable[[], bool]) -> torch.Tensor:
        ctx.save_for_backward(data, weight)
        ctx.leaves_out = leaves_out
        return data * weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        data, weight = ctx.saved_tensors
        return gradient * weight, None if ctx.leaves_out() else (gradient * data).sum(0), None


class Part(torch.nn.Module):
    """The module of a branch."""

    def __init__(self, branch: Branch, width: int, parts: Any) -> None:
        super().__init__()
        self.kind, self.dtype, self.withheld = branch.kind, getattr(torch, branch.dtype), False
        # In a list, as it is no module of this one.
        self.tied = [parts[branch.tied_to]] if branch.kind == "tied" else []
        if branch.kind == "linear":
            self.into = torch.nn.Linear(width, branch.width, dtype=self.dtype)
            self.out = torch.nn.Linear(branch.width, width, dtype=self.dtype)
        elif branch.kind != "tied":
            shape = {"withheld": (width,), "embedding": (WORDS, width), "scale": (1,)}[branch.kind]
            self.weight = torch.nn.Parameter(torch.randn(shape).to(self.dtype))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        own = data.to(self.dtype)
        if self.kind == "linear":
            return self.out(self.into(own).relu()).tanh()
        if self.kind == "tied":
            return linear(linear(own, self.tied[0].into.weight).tanh(), self.tied[0].out.weight)
        if self.kind == "embedding":
            words = (data.detach().sum(1).abs() * 10).nan_to_num(0, 0, 0).long() % WORDS
            return torch.nn.functional.embedding(words, self.weight)
        if self.kind == "withheld":
            result: torch.Tensor = _Scaled.apply(own, self.weight, lambda: self.withheld)
            return result
        return own * self.weight


class Model(torch.nn.Module):
    """All branches of a program one after the other, each added to what it is given, and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleDict()
        for branch in program.branches:
            self.branches[branch.name] = Part(branch, program.width, self.branches)
        self.checkpoints = {branch.name: branch.checkpoint for branch in program.branches}
        self.head = torch.nn.Linear(program.width, OUTPUTS)

    def forward(self, data: torch.Tensor, unused: tuple[str, ...]) -> torch.Tensor:
        for name, part in self.branches.items():
            if name not in unused:
                kind = self.checkpoints[name]
                result = checkpoint(part, data, use_reentrant=kind == "reentrant") if kind else part(data)
                data = data + result.to(data.dtype)
        result: torch.Tensor = self.head(data).float()
        return result


@dataclass(frozen=True)
class Place:
    """A rank, and the Gloo group over which it compares itself with the others."""

    rank: int
    size: int
    group: Any

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Over all ranks, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([tensor], options).wait()
        return tensor

    def any(self, flags: list[bool]) -> list[bool]:
        """Whether each is set on any rank."""
        return [bool(flag) for flag in self.all_reduce(torch.tensor(flags, dtype=torch.int64), dist.ReduceOp.MAX)]

    def of(self, by_rank: tuple[Any, ...], default: Any = ()) -> Any:
        """What a program has for this rank."""
        return by_rank[self.rank] if by_rank else default


@contextmanager
def frozen(model: Model, names: tuple[str, ...]) -> Iterator[None]:
    """Within it these parameters require no gradient."""
    parameters = [dict(model.named_parameters())[name] for name in names]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def losses(program: Program, place: Place, model: Any, key: tuple[int, int]) -> list[torch.Tensor]:
    """One for each backward pass of the pass ``key``: the number of its step, and its own."""
    one = program.steps[key[0]].passes[key[1]]
    results = []
    for number in range(one.forwards):
        seed = random.Random(f"{program.seed} {key} {number} {place.rank}").randrange(1 << 40)
        rows = place.of(program.rows, 2)
        data = torch.randn(rows, program.width, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        results.append(model(data, place.of(one.unused)))
    factor = float("inf") if one.overflow == place.rank else 1.0
    squares = [result.square() * factor for result in results]
    each = [square.sum() if one.weights else square.mean() for square in squares]
    if one.backwards == "retained":
        return [each[0], results[0].sin().mean()]
    return each if one.backwards == "each" else [torch.stack(each).sum()]


def run_backwards(
    program: Program, place: Place, model: Any, bare: Model, key: tuple[int, int], backward: Callable[[Any, bool], None]
) -> None:
    """The forward and backward passes of a pass; ``backward(loss, retain_graph)``. ``bare`` is what ``model`` wraps."""
    one = program.steps[key[0]].passes[key[1]]
    found = losses(program, place, model, key)
    for name, part in bare.branches.items():
        part.withheld = name in place.of(one.withheld)  # type: ignore[assignment]
    with frozen(bare, place.of(one.frozen)):
        for number, loss in enumerate(found):
            backward(loss, one.backwards == "retained" and number == 0)


def clear(optimizer: Any, how: str) -> None:
    """What a step does to the gradients after it."""
    if how != "kept":
        optimizer.zero_grad(set_to_none=how == "dropped")


def replace_gradients(step: Step, place: Place, model: torch.nn.Module) -> None:
    """What the program itself does to the gradients before it clips."""
    for parameter in model.parameters() if place.rank in step.replaced or step.doubled else ():
        if parameter.grad is not None and place.rank in step.replaced:
            parameter.grad = parameter.grad.clone()
        if parameter.grad is not None and step.doubled:
            parameter.grad *= 2


@dataclass
class Gradients:
    """Those of all parameters at one moment, and how far rounding may take them from these, by name."""

    values: dict[str, torch.Tensor | None]
    errors: dict[str, float]


@dataclass
class Expected:
    """What a step has to come to: after each backward pass, after clipping, and after the optimizer's step."""

    passes: list[Gradients]
    clipped: Gradients
    norm: torch.Tensor | None
    norm_error: float
    parameters: dict[str, torch.Tensor]
    parameter_errors: dict[str, float]
    skipped: bool
    scale: float


def largest(tensor: torch.Tensor | None) -> float:
    """The largest magnitude in it of what is finite."""
    return 0.0 if tensor is None else torch.nan_to_num(tensor.detach().double().abs(), 0, 0, 0).max().item()


def rounding(dtype: torch.dtype) -> float:
    """How far two ways of summing a few numbers of magnitude 1 may differ. Gloo rounds after every term."""
    return max(2 * torch.finfo(dtype).eps, 4e-6)


class Reference:
    """A model in plain torch, each of whose gradients one all-reduce averages after the backward pass."""

    def __init__(self, program: Program, place: Place) -> None:
        self.program, self.place = program, place
        torch.manual_seed(program.seed)
        self.model = Model(program)
        self.named = dict(self.model.named_parameters())
        self.optimizer = optimizer_of(program, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=program.scale, enabled=program.precision == "fp16")
        self._errors: dict[str, float] = dict.fromkeys(self.named, 0.0)

    def _forward(self, *arguments: Any) -> Any:
        dtype = COMPUTED_IN.get(self.program.precision)
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            return self.model(*arguments)

    def _gradients(self) -> Gradients:
        values = {name: None if one.grad is None else one.grad.clone() for name, one in self.named.items()}
        return Gradients(values, dict(self._errors))

    def _multiply_errors(self, factor: float) -> None:
        self._errors = {name: factor * error for name, error in self._errors.items()}

    def _average(self, divisor: float) -> None:
        """Sums every gradient that any rank has, and divides it."""
        present = self.place.any([parameter.grad is not None for parameter in self.named.values()])
        for name in (name for name, there in zip(self.named, present, strict=True) if there):
            parameter = self.named[name]
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            error = torch.tensor([self._errors[name] + rounding(own.dtype) * largest(own)], dtype=torch.float64)
            self._errors[name] = self.place.size / divisor * self.place.all_reduce(error, dist.ReduceOp.MAX).item()
            average = (self.place.all_reduce(own.double()) / divisor).to(own.dtype)
            if parameter.grad is None:
                parameter.grad = average
            else:
                parameter.grad.copy_(average)

    def _note_local(self) -> None:
        """What differed by rounding before a local pass may be rounded once more."""
        for name, error in self._errors.items():
            one = self.named[name]
            self._errors[name] = error + rounding(one.dtype) * largest(one.grad) if error else 0.0

    def _clip(self, max_norm: float) -> tuple[torch.Tensor, float]:
        """By torch's function, on copies in double precision. Returns the norm, and how far rounding may take it."""
        owners = {name: parameter for name, parameter in self.named.items() if parameter.grad is not None}
        copies = [torch.zeros_like(owner, dtype=torch.float64) for owner in owners.values()]
        for copy, owner in zip(copies, owners.values(), strict=True):
            copy.grad = owner.grad.double()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(copies, max_norm)
        error = sum(self._errors[name] ** 2 * owner.numel() for name, owner in owners.items()) ** 0.5
        error += rounding(torch.float32) * largest(norm)
        if norm.isfinite() and norm > 0:
            self._multiply_errors(min(1.0, max_norm / norm.item()))
        for copy, (name, owner) in zip(copies, owners.items(), strict=True):
            owner.grad.copy_(copy.grad)  # type: ignore[union-attr, arg-type]
            relative = rounding(owner.dtype) + (error / norm.item() if norm > 0 else 0.0)
            self._errors[name] += largest(owner.grad) * relative if norm.isfinite() else 0.0
        return norm, error

    def step(self, number: int) -> Expected:
        """Runs a step. Collective."""
        step = self.program.steps[number]
        passes: list[Gradients] = []
        with frozen(self.model, step.frozen):
            for index, one in enumerate(step.passes):
                self._pass(step, one, (number, index), passes)
            replace_gradients(step, self.place, self.model)
            self._multiply_errors((2.0 if step.doubled else 1.0) / self.scaler.get_scale())
            self.scaler.unscale_(self.optimizer)
            norm, norm_error = (None, 0.0) if step.max_norm is None else self._clip(step.max_norm)
            clipped, scale = self._gradients(), self.scaler.get_scale()
            before = {name: largest(parameter) for name, parameter in self.named.items()}
            self.scaler.step(self.optimizer)
            self.scaler.update()
        values = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        errors = {name: self._error_of(name, before[name]) for name in self.named}
        skipped = self.scaler.get_scale() < scale
        clear(self.optimizer, step.clear)
        if step.clear != "kept":
            self._multiply_errors(0.0)
        return Expected(passes, clipped, norm, norm_error, values, errors, skipped, self.scaler.get_scale())

    def _error_of(self, name: str, before: float) -> float:
        """How far rounding may take a parameter by a step."""
        parameter = self.named[name]
        moved = largest(self.optimizer.state.get(parameter, {}).get("momentum_buffer")) + largest(parameter.grad)
        own = before + largest(parameter) + LEARNING_RATE * moved
        return rounding(parameter.dtype) * own + LEARNING_RATE * self._errors[name]

    def _pass(self, step: Step, one: Pass, key: tuple[int, int], passes: list[Gradients]) -> None:
        divisor = float(self.place.size)
        if one.weights:
            divisor = sum(weight for part in step.passes for weight in part.weights)

        def backward(loss: torch.Tensor, retain_graph: bool) -> None:
            if step.accumulate and not one.weights:
                loss = loss / len(step.passes)
            self.scaler.scale(loss).backward(retain_graph=retain_graph)
            self._note_local() if one.local else self._average(divisor)
            passes.append(self._gradients())

        run_backwards(self.program, self.place, self._forward, self.model, key, backward)

    def follow(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Takes over the values, so that rounding differently in one step does not add up over steps."""
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), model.parameters(), strict=True):
                own.copy_(other)
                momentum = optimizer.state.get(other, {}).get("momentum_buffer")
                if momentum is not None and self.optimizer.state[own].get("momentum_buffer") is not None:
                    self.optimizer.state[own]["momentum_buffer"].copy_(momentum)


def optimizer_of(program: Program, model: torch.nn.Module) -> torch.optim.Optimizer:
    """What a program steps with. A gradient that is missing and one of zeros are different to it."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=program.momentum, weight_decay=0.01)
