"""Optimizers of torch and bitsandbytes in the form that DeepSpeed steps on CPUs, when it offloads their states."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["cpu_form_of"]

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")


def cpu_form_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer of DeepSpeed over the same parameter groups that takes the same steps; ``None`` if it has none.

    Groups are shared, so that schedules of ``optimizer`` change the rates of the new one.
    """
    kind = _kind_of(optimizer)
    options = [group for group in optimizer.param_groups if any(group.get(name) for name in _UNSUPPORTED)]
    if (
        kind is None
        or options
        or (kind == "adagrad" and any(group.get("lr_decay") for group in optimizer.param_groups))
    ):
        return None
    operators = importlib.import_module(f"deepspeed.ops.{'adam' if kind.startswith('adam') else kind}")
    if kind == "lion":
        made = operators.DeepSpeedCPULion(optimizer.param_groups)
    elif kind == "adagrad":
        made = operators.DeepSpeedCPUAdagrad(optimizer.param_groups)
    else:
        made = operators.DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=kind == "adamw")
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules warn unless their optimizer has stepped
    return made  # type: ignore[no-any-return]


def _kind_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Which of DeepSpeed's optimizers takes the same steps; subclasses that step otherwise have none."""
    if type(optimizer).__module__.startswith("bitsandbytes."):
        arguments: Any = getattr(optimizer, "args", None)
        bits = getattr(optimizer, "optim_bits", getattr(arguments, "optim_bits", None))
        name = type(optimizer).__name__.removeprefix("Paged").removesuffix("32bit").lower()
        return name if bits == 32 and name in ("adam", "adamw", "adagrad", "lion") else None
    kinds = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.Adagrad: "adagrad"}
    kind = kinds.get(type(optimizer))
    if kind == "adam" and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        return "adamw"
    return kind
