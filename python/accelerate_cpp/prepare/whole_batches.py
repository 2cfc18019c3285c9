"""Passes of a model over a whole batch, where a model in stages could not return in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.pipeline import Evaluation

__all__ = ["Evaluation", "evaluated_batch", "loss_of_batch", "only_model"]

LossFunction = Callable[..., torch.Tensor]


def only_model(models: Sequence[torch.nn.Module], operation: str) -> torch.nn.Module:
    """The one that has been prepared.

    Raises:
        InvalidArgument: there are several, or none.
    """
    if len(models) != 1:
        raise InvalidArgument(f"{operation}: {len(models)} models have been prepared; pass model=..., one of them")
    return models[0]


def loss_of_batch(
    model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None = None, targets: Any = None
) -> torch.Tensor:
    """The loss of ``model`` for ``batch``, with its graph; see ``Accelerator.train_batch``."""
    return _loss(_outputs(model, batch), batch, loss_fn, targets)


def evaluated_batch(
    model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None = None, targets: Any = None
) -> Evaluation:
    """Loss and outputs of ``model`` for ``batch``, without a graph; see ``Accelerator.eval_batch``."""
    with torch.no_grad():
        outputs = _outputs(model, batch)
        measures = loss_fn is not None or getattr(outputs, "loss", None) is not None
        loss = _loss(outputs, batch, loss_fn, targets) if measures else None
    return Evaluation(loss, getattr(outputs, "logits", outputs))


def _outputs(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss(outputs: Any, batch: Any, loss_fn: LossFunction | None, targets: Any) -> torch.Tensor:
    if loss_fn is None:
        loss: torch.Tensor | None = getattr(outputs, "loss", None)
        if loss is None:
            raise InvalidArgument(
                f"train_batch: the model returned a {type(outputs).__name__} without a loss; pass loss_fn, which is "
                "called with outputs and targets, or labels in the batch of a model that computes its own"
            )
        return loss
    if targets is None and isinstance(batch, Mapping):
        targets = batch.get("labels", batch)
    given = getattr(outputs, "logits", outputs)
    return loss_fn(given) if targets is None else loss_fn(given, targets)
