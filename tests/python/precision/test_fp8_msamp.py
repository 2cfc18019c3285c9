"""fp8 through MS-AMP, against a module that stands in for it: the real one computes on GPUs only."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerate_cpp.precision.fp8_msamp import convert


def test_model_and_optimizer_are_those_that_the_library_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    msamp: Any = ModuleType("msamp")
    msamp.initialize = lambda model, optimizer, opt_level: ((model, opt_level), optimizer)
    monkeypatch.setitem(sys.modules, "msamp", msamp)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(FutureWarning, match="no longer developed; use AORecipeKwargs"):
        assert convert(model, optimizer, {"opt_level": "O1"}) == ((model, "O1"), optimizer)
