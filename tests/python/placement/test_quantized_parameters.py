"""Parameters of bitsandbytes, by stand-ins; test_bnb.py has the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.placement.quantized_parameters import quantized, quantizes


class _StandIn(nn.Parameter):
    """Quantizes on its way to a device, if it comes from the CPU."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> _StandIn:
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        vars(self).update(options, CB=None, SCB=None)
        return self

    def to(self, device: torch.device) -> Any:  # type: ignore[override]
        assert self.device.type == "cpu"
        rounded = self.data if self.dtype == torch.int8 else self.data.round().to(torch.int8)
        new = type(self)(rounded, **{name: value for name, value in vars(self).items() if name not in ("CB", "SCB")})
        new.SCB = torch.ones(len(rounded))
        return new


def parameter(name: str = "Int8Params", module: str = "bitsandbytes.nn.modules", **options: Any) -> Any:
    kind = type(name, (_StandIn,), {"__module__": module})
    return kind(torch.empty(2, 2, device="meta"), **options)


def test_the_librarys_parameters_quantize_until_they_are_quantized() -> None:
    assert quantizes(parameter())
    assert quantizes(parameter("Params4bit", bnb_quantized=False))
    assert not quantizes(parameter("Params4bit", bnb_quantized=True))
    assert not quantizes(quantized(parameter(), torch.ones(2, 2), torch.device("cpu")))
    assert not quantizes(parameter(module="another.library"))
    assert not quantizes(nn.Parameter(torch.ones(1)))
    assert not quantizes(None)


def test_values_are_quantized_with_the_options_of_the_old_parameter() -> None:
    new: Any = quantized(parameter(blocksize=64), torch.tensor([[1.2, 2.0], [3.0, 4.0]]), torch.device("cpu"))
    assert (type(new).__name__, new.dtype, new.blocksize) == ("Int8Params", torch.int8, 64)
    assert new.tolist() == [[1, 2], [3, 4]]
    assert not new.requires_grad


@pytest.mark.parametrize("scales", [None, torch.tensor([2.0, 3.0])])
def test_values_of_8_bits_keep_their_scales(scales: torch.Tensor | None) -> None:
    value = torch.ones(2, 2, dtype=torch.int8)
    new: Any = quantized(parameter(), value, torch.device("cpu"), scales)
    assert new.SCB.tolist() == ([1.0, 1.0] if scales is None else [2.0, 3.0])
