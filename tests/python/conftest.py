"""What tests of several folders need."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.config.fp8 import LIBRARIES


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Spares the collector what the tests before have loaded: a collection takes most of a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def only_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with the names of modules: of the libraries for fp8, these can be found, as empty ones, and no others."""

    def install(*modules: str) -> None:
        for library in LIBRARIES.values():
            if library.module in modules:
                monkeypatch.setitem(sys.modules, library.module, None)  # so that what is imported here goes again
                monkeypatch.delitem(sys.modules, library.module)
                (tmp_path / library.module).mkdir()
                (tmp_path / library.module / "__init__.py").touch()
            else:
                monkeypatch.setitem(sys.modules, library.module, None)
        monkeypatch.syspath_prepend(tmp_path)

    return install


class Format(Enum):
    HYBRID = 1
    E4M3 = 2


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3


def _layers() -> dict[str, Any]:
    from torch import nn

    class Linear(nn.Linear):
        def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: Any, device: Any) -> None:
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

    class LayerNorm(nn.LayerNorm):
        def __init__(self, hidden_size: int, eps: float, params_dtype: Any, device: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=params_dtype, device=device)

    return {"Linear": Linear, "LayerNorm": LayerNorm, "TransformerLayer": type("TransformerLayer", (nn.Module,), {})}


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules that stand in for TransformerEngine, which computes on GPUs only: ``pytorch`` and ``recipe``.

    ``entered`` lists what was entered, ``blocks`` is whether the GPU scales blocks, and why not.
    """
    seen = SimpleNamespace(entered=[], blocks=(True, ""))

    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Any:
        seen.entered.append((enabled, recipe))
        yield

    root, common, recipe, pytorch = (
        ModuleType(f"transformer_engine{name}") for name in ("", ".common", ".common.recipe", ".pytorch")
    )
    vars(recipe).update(Format=Format, DelayedScaling=DelayedScaling, MXFP8BlockScaling=MXFP8BlockScaling)
    vars(pytorch).update(_layers(), autocast=autocast, is_mxfp8_available=lambda return_reason: seen.blocks)
    vars(common).update(recipe=recipe)
    vars(root).update(common=common, pytorch=pytorch)
    root.__spec__ = ModuleSpec(root.__name__, None, origin="a stand-in")
    for module in (root, common, recipe, pytorch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    seen.pytorch, seen.recipe = pytorch, recipe
    return seen


Outcome = dict[str, Any] | str


def shown(value: Any) -> Any:
    """``value`` without what tells the two packages apart."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, functools.partial):
        return (value.func.__name__, {name: shown(option) for name, option in value.keywords.items()})
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__name__", "callable")
    if hasattr(value, "set_stage_and_offload"):
        return value.config
    return repr(value) if hasattr(value, "__dataclass_fields__") else value


@pytest.fixture
def comes_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """``comes_to(kind, arguments, variables)``: attributes of the object and changed variables, or ``"refused"``."""

    def comes_to(
        kind: type, arguments: Mapping[str, Any] | None = None, variables: Mapping[str, str] | None = None
    ) -> Outcome:
        before = {**os.environ, **(variables or {})}
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", dict(before))
            try:
                made = kind(**(arguments or {}))
            except Exception:
                return "refused"
            changed = dict(os.environ.items() - before.items())
        return {name: shown(value) for name, value in vars(made).items()} | {"variables": changed}

    return comes_to
