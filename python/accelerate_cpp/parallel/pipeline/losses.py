"""The loss of a batch from those of its parts: the same as that of the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Batches
from accelerate_cpp.parallel.pipeline.micro_batches import MicroBatches
from accelerate_cpp.parallel.pipeline.outputs import Outputs

__all__ = ["LossFunction", "PartsOfLoss", "Shares"]

LossFunction = Callable[..., Tensor]
Shares = Callable[[Any], "Tensor | float"]


class PartsOfLoss:
    """What the last stage does with the outputs of each part of a batch.

    Args:
        loss_fn: of outputs and targets, or of outputs alone if there are no targets; the model's own without one.
        counted: for targets, how many elements the mean that ``loss_fn`` returns is over. By default their labels that
            count, for a cross entropy and for labels of a decoder; else their rows. A ``loss_fn`` with ``reduction ==
            "sum"`` needs none.
        scale: what gradients are multiplied with.
        outputs: where outputs are kept, if they are.
        measures: whether there is a loss.

    Attributes:
        losses: the shares of the loss that parts have, detached and not scaled.
    """

    def __init__(
        self,
        batches: Batches,
        parts: MicroBatches,
        has_targets: bool,
        loss_fn: LossFunction | None,
        counted: Shares | None,
        scale: float | Tensor = 1.0,
        outputs: Outputs | None = None,
        measures: bool = True,
    ) -> None:
        self._batches, self._parts, self._has_targets = batches, parts, has_targets
        self._loss_fn, self._scale, self._outputs, self._measures = loss_fn, scale, outputs, measures
        self.losses: dict[int, Tensor] = {}
        self._weights = self._weights_of_parts(counted) if measures else []

    def __call__(self, outputs: Any, number: int) -> Tensor:
        """The loss of which the gradient is taken for one part; it is no view."""
        outputs = self._parts.without_repeated(outputs, number)
        if self._outputs is not None:
            self._outputs.keep(outputs)
        if not self._measures:
            return torch.zeros(())
        loss = self._share(outputs, number)
        self.losses[number] = loss.detach()
        return loss * self._scale

    def total(self) -> Tensor:
        return torch.stack([loss.double() for loss in self.losses.values()]).sum()

    def _share(self, outputs: Any, number: int) -> Tensor:
        weight = self._weights[number]
        if not self._parts.rows[number] or weight == 0:
            # A mean over nothing would not be a number. This one has all gradients, which are zero.
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            return torch.stack([tensor[:0].sum() for tensor in tensors]).sum().float()
        targets = self._parts.targets(number)
        if self._loss_fn is None:
            return self._batches.default_loss(outputs, targets, weight)
        loss = self._loss_fn(outputs, targets) if self._has_targets else self._loss_fn(outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgument(
                f"pipeline: loss_fn returned {found}; expected a tensor with one element, the mean over the rows of a "
                "part of the batch"
            )
        return loss.reshape(()) * weight

    def _weights_of_parts(self, counted: Shares | None) -> Sequence[float]:
        """What the loss of each part is multiplied with. For the model's own loss: what its sum is divided by."""
        parts = self._parts
        numbers = range(parts.count)
        if self._loss_fn is None:
            known = [self._batches.counted(parts.targets(number)) for number in numbers]
            if None in known:
                raise InvalidArgument(
                    "pipeline: without loss_fn the loss is that of a decoder of Transformers for labels of shape "
                    "(rows, tokens), which are missing; pass labels, or loss_fn(outputs, targets)"
                )
            return [float(sum(filter(None, known)))] * parts.count
        if counted is None and getattr(self._loss_fn, "reduction", None) == "sum":
            return [1.0] * parts.count
        shares = [self._share_of(counted, number) for number in numbers]
        whole = sum(shares)
        return [share / whole if whole else share for share in shares]

    def _share_of(self, counted: Shares | None, number: int) -> float:
        targets, rows = self._parts.targets(number), self._parts.rows[number]
        if not rows:
            return 0.0
        if counted is not None:
            return float(counted(targets))
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            if isinstance(self._loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
                chosen = targets[targets != self._loss_fn.ignore_index]
                weight = self._loss_fn.weight
                return float(chosen.numel() if weight is None else weight[chosen.to(weight.device)].sum())
            if self._loss_fn in (functional.cross_entropy, functional.nll_loss):
                return float((targets != -100).sum())
        count = self._batches.counted(targets)
        return float(rows if count is None else count)
