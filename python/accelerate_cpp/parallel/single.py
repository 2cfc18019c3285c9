"""One process: every answer is the neutral one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.clipping import clip_grad_norm
from accelerate_cpp.parallel.compilation import without_compiler
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import HandOver, ModelSteps, Strategy


def share_of(total: float, parts: int = 1) -> float:
    """The factor that divides a sum, or a mean of ``parts`` sums, by the weight ``total``; 0 for weight 0."""
    return parts / total if total > 0.0 else 0.0


def multiply_gradients(factors: Mapping[torch.nn.Module, float]) -> None:
    """Multiplies the gradients of models in place by their factors; a gradient of several models by that of one."""
    together: dict[float, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for model, factor in factors.items():
        for parameter in model.parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                together.setdefault(factor, []).append(local_part(parameter.grad))
    for factor, gradients in together.items():
        torch._foreach_mul_(gradients, factor)


def weigh_averages(models: Sequence[torch.nn.Module], weights: PassWeights, device: torch.device, ranks: int) -> None:
    """Divides gradients by their weights, where what averaged them only knows the number of ranks. Collective."""
    if not models:
        return
    own = [(weights.totals[model], 1.0) if model in weights.touched else (0.0, 0.0) for model in models]
    summed = torch.tensor(own, device=device)
    dist.all_reduce(summed)
    found = zip(models, summed.tolist(), strict=True)
    multiply_gradients({model: share_of(total, ranks) for model, (total, touching) in found if touching})


class SingleStrategy(Strategy):
    """Trains only in this process; models are used as they are."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def prepare(self, bundle: Bundle, steps: Sequence[ModelSteps] | None = None) -> Bundle:
        orders = [ModelSteps()] * len(bundle.models) if steps is None else steps
        bundle.models = [self._prepare(model, own) for model, own in zip(bundle.models, orders, strict=True)]
        return bundle

    def _prepare(self, model: torch.nn.Module, steps: ModelSteps) -> torch.nn.Module:
        """Regions are compiled inside what distributes the model, the whole with it, so that its hooks are, too."""
        return steps.compile(self._distribute(steps.compile_regions(steps.cast(steps.place(model)))))

    def _distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        self._models.add(model)
        return model

    def models(self) -> list[torch.nn.Module]:
        return list(self._models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        loss.backward(**kwargs)
        if weights is not None:
            touched = (model for model in weights.totals if model in weights.touched)
            multiply_gradients({model: share_of(weights.totals[model]) for model in touched})

    def join(self, models: Iterable[Any], hand_over: HandOver | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        return clip_grad_norm(parameters, max_norm, norm_type, measured)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return without_compiler(model)

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()
