"""One process: every answer is the neutral one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.clipping import clip_grad_norm
from accelerate_cpp.parallel.strategy import Strategy


class SingleStrategy(Strategy):
    """Trains in this process alone; models are used as they are."""

    def prepare(self, bundle: Bundle) -> Bundle:
        return bundle

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float, float]] | None = None,
    ) -> torch.Tensor:
        return clip_grad_norm(parameters, max_norm, norm_type, measured)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.unwrap(model).load_state_dict(state)
