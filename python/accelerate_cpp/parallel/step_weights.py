"""The weights of the backward passes of a step, for each model that their losses depend on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp.errors import InvalidArgument


@dataclass(frozen=True)
class PassWeights:
    """The weights of one backward pass.

    Attributes:
        totals: for each model, the weight of its gradients after the pass, if its loss depends on the model; empty if
            the pass has no weight or does not complete the step.
        touched: the models that the loss turned out to depend on; complete when the pass has ended.
    """

    totals: Mapping[torch.nn.Module, float] = field(default_factory=dict)
    touched: set[torch.nn.Module] = field(default_factory=set)


class TrainedModels(Protocol):
    """What weights have to know of the models that are trained."""

    def models(self) -> Iterable[torch.nn.Module]:
        """Those whose gradients weights divide."""
        ...

    def leaves(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The tensors to which backward passes through ``model`` give gradients."""
        ...

    def has_gradients(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` has gradients of earlier passes, wherever they are kept."""
        ...


_NO_WEIGHTS: nullcontext[None] = nullcontext()


@dataclass
class _Step:
    """For one model, the weights of the passes since its last step, and whether its gradients are divided by them."""

    weight: float = 0.0
    divided: bool = False


class StepWeights:
    """Adds up, for each model, the weights of the passes whose losses depend on it, until its optimizer steps."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[torch.nn.Module, _Step] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._some_had_none = False
        self.is_weighing = False
        """Whether a backward pass is running that has a weight."""

    def of_pass(
        self, trained: TrainedModels, weight: float | None, completes: bool
    ) -> AbstractContextManager[PassWeights | None]:
        """Inside this block, one backward pass runs.

        Args:
            trained: the models whose gradients weights divide, and their parameters.
            weight: of the pass; ``None`` for a loss that is a mean.
            completes: whether gradients are divided at the end of the pass.

        Returns:
            A context with the weights that the pass needs, ``None`` if there are none.

        Raises:
            InvalidArgument: ``weight`` is negative or not finite. After the pass: some passes of the step of a model
                have a weight and some have none; or its gradients had already been divided by their weights.
        """
        if weight is not None and not 0.0 <= weight < math.inf:
            raise InvalidArgument(f"weight={weight}: expected a finite number that is not negative")
        if weight is None and not self._steps:
            self._some_had_none = True
            return _NO_WEIGHTS
        return self._weighed(trained, weight, completes)

    @contextmanager
    def _weighed(self, trained: TrainedModels, weight: float | None, completes: bool) -> Iterator[PassWeights | None]:
        watched = list(trained.models())
        for model in [model for model in self._steps if not trained.has_gradients(model)]:  # they were cleared
            del self._steps[model]
        self._known.update(watched)
        mixed = [model for model in watched if weight is not None and self._has_gradients_without_weight(model)]
        totals = {model: self._weight_of(model) + weight for model in watched} if weight is not None else {}
        weights = PassWeights(totals if completes else {})
        self.is_weighing = weight is not None
        try:
            with _watching({model: trained.leaves(model) for model in watched}, weights.touched):
                yield weights
        finally:
            self.is_weighing = False
        self._record_pass(weights.touched, totals, mixed, completes)
        self._some_had_none |= weight is None

    def end_step(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """An optimizer with these parameter groups has stepped, or cleared its gradients."""
        self._some_had_none = False
        if not self._steps:
            return
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        owners = [model for model in self._known if any(id(one) in stepped for one in model.parameters())]
        for model in owners or list(self._steps):
            self._steps.pop(model, None)

    def _weight_of(self, model: torch.nn.Module) -> float:
        return self._steps[model].weight if model in self._steps else 0.0

    def _has_gradients_without_weight(self, model: torch.nn.Module) -> bool:
        if not self._some_had_none or model in self._steps:
            return False
        return any(weight.grad is not None and bool(weight.grad.any()) for weight in model.parameters())

    def _record_pass(
        self,
        touched: Iterable[torch.nn.Module],
        totals: Mapping[torch.nn.Module, float],
        mixed: Iterable[torch.nn.Module],
        completes: bool,
    ) -> None:
        for model in touched:
            step = self._steps.get(model)
            if step is not None and step.divided:
                raise InvalidArgument(
                    f"a second backward pass through {_name_of(model)} after its gradients had already been divided by "
                    "their weights: new gradients cannot be added to them; step and zero the gradients first, put all "
                    "passes of a step into accumulate(), add losses of one batch before a single backward pass, or "
                    "freeze a model that a loss passes through without training it"
                )
            if model in mixed or (step is not None and model not in totals):
                self._steps.pop(model, None)
                raise InvalidArgument(
                    f"some backward passes of this step of {_name_of(model)} have a weight and some have none; "
                    "pass backward(loss, weight=...) in all of them, or in none"
                )
            if model in totals:
                self._steps[model] = _Step(0.0 if completes else totals[model], divided=completes)


@contextmanager
def _watching(
    models: Mapping[torch.nn.Module, Iterable[torch.Tensor]], touched: set[torch.nn.Module]
) -> Iterator[None]:
    """Inside this block, backward passes add to ``touched`` the ``models`` of which a leaf gets a gradient."""
    handles = [
        parameter.register_hook(lambda _, model=model: touched.add(model))
        for model, leaves in models.items()
        for parameter in leaves
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _name_of(model: torch.nn.Module) -> str:
    return type(model.module if isinstance(model, DistributedDataParallel) else model).__name__
