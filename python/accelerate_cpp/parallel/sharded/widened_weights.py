"""The dtypes in which trained weights are stored: wide enough for small steps, whatever layers compute in."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)
_WIDE = (torch.float32, torch.float64)


class WidenedWeights:
    """The trained weights of ``model`` that are to be stored in fp32, although the model has them in less.

    Args:
        low_precision: whether forward passes compute in less than fp32; if not, weights stay as they are.
    """

    def __init__(self, model: torch.nn.Module, low_precision: bool) -> None:
        self._kind = type(model).__name__
        self._low_precision = low_precision
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        self._widened: dict[str, None] = {}

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which ``tensor``, a parameter or buffer, is to be stored."""
        widens = (
            self._low_precision
            and isinstance(tensor, torch.nn.Parameter)
            and tensor.requires_grad
            and tensor.is_floating_point()
            and tensor.dtype not in _WIDE
        )
        if widens:
            self._widened[self._names.get(id(tensor), "a parameter")] = None
        return torch.float32 if widens else tensor.dtype

    def tell(self) -> None:
        """Logs on rank 0 which weights those were."""
        if self._widened and dist.get_rank() == 0:
            _log.info(
                "%d parameters of %s that are trained were stored in less than fp32, and are stored in fp32 now, in "
                "which the optimizer steps: %s",
                len(self._widened),
                self._kind,
                ", ".join(list(self._widened)[:3]),
            )
