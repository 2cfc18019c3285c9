"""Forward passes in mixed precision: computed under ``torch.autocast``, with results in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accelerate_cpp.devices.tree import recursively_apply
from accelerate_cpp.precision.precision import Precision

_LOW = (torch.float16, torch.bfloat16)


def to_fp32(data: Any) -> Any:
    """Nested ``data`` with every fp16 and bf16 tensor converted to fp32; container types and other leaves are kept."""
    return recursively_apply(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, data)


class MixedPrecisionForward:
    """The replacement for a module's ``forward``. It can be pickled and deep-copied together with its module.

    Args:
        module: whose ``_original_forward`` does the work.
        precision: what it computes in.
        options: of ``torch.autocast``.
        keeps_low_precision: whether results stay fp16 or bf16, which halves the memory of large ones.
    """

    def __init__(
        self, module: torch.nn.Module, precision: Precision, options: Mapping[str, Any], keeps_low_precision: bool
    ) -> None:
        self._module = module
        self._precision = precision
        self._options = dict(options)
        self._keeps_low_precision = keeps_low_precision

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward, for tools that inspect signatures."""
        return self._module._original_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.forward_context(self._options, self._module.training):
            result = self._module._original_forward(*args, **kwargs)  # type: ignore[operator]
        return result if self._keeps_low_precision else to_fp32(result)


def install(
    module: torch.nn.Module,
    precision: Precision,
    options: Mapping[str, Any] | None = None,
    keeps_low_precision: bool = False,
) -> torch.nn.Module:
    """Makes ``module`` compute in ``precision`` and returns it; without effect in full precision or a second time."""
    if precision.compute_dtype is None or "_original_forward" in module.__dict__:
        return module
    replacement = MixedPrecisionForward(module, precision, options or {}, keeps_low_precision)
    for name, value in (("_original_forward", module.forward), ("forward", replacement)):
        object.__setattr__(module, name, value)  # a compiled module would hand it on to the module inside
    return module


def remove(module: torch.nn.Module) -> torch.nn.Module:
    """Restores the forward that ``module`` had before :func:`install`, and returns it."""
    original = module.__dict__.pop("_original_forward", None)
    if original is None:
        return module
    module.__dict__.pop("forward")
    if getattr(original, "__func__", None) is not type(module).forward:
        object.__setattr__(module, "forward", original)
    return module
