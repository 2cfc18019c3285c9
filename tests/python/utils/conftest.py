"""What tests of configuration classes need: what a class comes to, own or the original's, in a form to compare."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import pytest

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
