"""The variables that a function uses from its definition: those of outer functions and of its module."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from contextlib import suppress
from inspect import getattr_static
from types import CodeType, FunctionType
from typing import Any


def variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each that ``function`` uses itself; empty if it is not written in Python."""
    function = _written(function)
    if function is None:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing was assigned to it
            yield name, cell.cell_contents
    for name in _globals_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def variables_reached(function: Any) -> Iterator[tuple[str, Any]]:
    """The same, and what functions among them use that are defined in the same module."""
    module = getattr(_written(function), "__globals__", None)
    seen: list[Any] = [function]
    for each in seen:
        for name, value in variables_of(each):
            yield name, value
            inner = _written(value)
            if inner is not None and inner.__globals__ is module and not any(value is one for one in seen):
                seen.append(value)


def _written(function: Any) -> FunctionType | None:
    """The Python function behind ``function``, which may be a partial, a method or an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    for candidate in (function, getattr(function, "__func__", None), getattr_static(type(function), "__call__", None)):
        if isinstance(candidate, FunctionType):
            return candidate
    return None


def _globals_in(code: CodeType) -> dict[str, None]:
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _globals_in(constant)
    return names
