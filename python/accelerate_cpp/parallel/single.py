"""One process: every answer is the neutral one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.clipping import clip_grad_norm
from accelerate_cpp.parallel.compilation import without_compiler
from accelerate_cpp.parallel.strategy import Strategy


def multiply_gradients(models: Iterable[torch.nn.Module], factor: float) -> None:
    """Multiplies the gradients of ``models`` in place, those that they share once."""
    parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


class SingleStrategy(Strategy):
    """Trains in this process alone; models are used as they are."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def prepare(self, bundle: Bundle) -> Bundle:
        self._models.update(bundle.models)
        return bundle

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, weight: float | None = None, **kwargs: Any) -> None:
        loss.backward(**kwargs)
        if weight is not None:
            multiply_gradients(self._models, 1.0 / weight if weight > 0.0 else 0.0)

    def join(self, models: Iterable[Any]) -> AbstractContextManager[bool]:
        return nullcontext(False)

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

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.unwrap(model).load_state_dict(state)
