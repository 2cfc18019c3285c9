"""The loss scaler of fp16 training on accelerators."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from accelerate_cpp._native import known_device_statistics
from accelerate_cpp.devices.shards import is_sharded_tensor


class DeviceGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that makes no pass over gradients that were measured while they were reduced.

    Measurements stay on the device and are used until the gradient may have been changed: whether it is finite, for
    fused optimizers, which un-scale by themselves; and the sums of its squares, for clipping, which can multiply by the
    inverse scale while it clips. The host waits for the device where torch's scaler does, and nowhere else. Every other
    gradient is torch's to un-scale and check; those in shards apart from plain ones, which torch does not take at once.

    Args:
        device: the type of the device of the losses, such as ``"cuda"``.
        kwargs: of ``torch.amp.GradScaler``.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._left: frozenset[int] = frozenset()
        self._measured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of the last backward pass are already divided by the scale."""
        return not self._enabled or self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED

    def unscale_but(
        self, optimizer: torch.optim.Optimizer, left: frozenset[int]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """As ``unscale_(optimizer)``, but the caller multiplies gradients that need no measuring.

        Args:
            left: ``id`` s of parameters whose gradients the caller can multiply.

        Returns:
            By ``id`` of those parameters, as tensors of one number on their device: the sums of the squares of their
            gradients as they are now, and the factors by which the caller has still to multiply these gradients.
        """
        self._left, self._measured = left, {}
        try:
            self.unscale_(optimizer)
            return self._measured
        finally:
            self._left, self._measured = frozenset(), {}

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Halves are allowed where gradients are only checked, for an optimizer that un-scales them.
        only_checks = allow_fp16
        known: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        others = []
        for parameter, row in zip(parameters, known_device_statistics(parameters), strict=True):
            leaves = only_checks or (id(parameter) in self._left and parameter.dtype is not torch.float16)
            if row is not None and leaves:
                known.setdefault(parameter.device, []).append((id(parameter), row))
            else:
                others.append(parameter)
        found: dict[torch.device, torch.Tensor] = {}
        for alike in _without_mixtures(others):
            rest: Any = SimpleNamespace(param_groups=[{"params": alike}])
            for device, overflow in super()._unscale_grads_(rest, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], overflow) if device in found else overflow
        for device, rows in known.items():
            table = torch.stack([row for _, row in rows])
            overflow = (table[:, 1].sum() > 0).to(torch.float32)
            found[device] = torch.maximum(found[device], overflow) if device in found else overflow
            self._note(rows, table, inv_scale)
        return found

    def _note(self, rows: Iterable[tuple[int, Any]], table: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for (key, _), squares in zip(rows, table[:, 0].unbind(), strict=True):
            self._measured[key] = (squares, inv_scale)


def _without_mixtures(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those with plain gradients, and those whose gradients are in shards: torch's operation takes no mixture."""
    kinds: dict[bool, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(is_sharded_tensor(parameter.grad), []).append(parameter)
    return list(kinds.values())
