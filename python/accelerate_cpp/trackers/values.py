"""The values that scripts log, as libraries can store them."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterator, Mapping
from typing import Any


def as_number(value: Any) -> int | float | None:
    """``value`` as a Python number; ``None`` if it is not a number.

    Numbers are those of Python (flags, too) and of NumPy, and tensors and arrays with one element, of any device.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "item") or math.prod(shape) != 1:
        return None
    item = value.item()
    return item if isinstance(item, int | float) else None


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with values that are not dictionaries: ``{"a": {"b": 1}}`` gives ``("a/b", 1)``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with every number as a Python number, in inner dictionaries, too; everything else is unchanged."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        number = as_number(value)
        inner = with_numbers(value) if isinstance(value, Mapping) else value
        result[name] = inner if number is None else number
    return result


def plain(value: Any) -> Any:
    """``value`` as YAML and JSON have it: numbers, flags, texts, ``None``, and lists and dictionaries of these.

    Other objects become their text.
    """
    number = as_number(value)
    if number is not None:
        return number
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in value]
    return str(value)


def leave_out(tracker: str, name: str, value: Any, takes: str) -> None:
    """Warns, once for each name and type, that ``tracker`` cannot log ``value``; ``takes`` is what it can."""
    kind = type(value)
    warnings.warn(
        f"{tracker} leaves out {name!r}: it is of type {kind.__module__}.{kind.__qualname__}, and {tracker} logs "
        f"{takes}; convert it, or log it with get_tracker({tracker!r}, unwrap=True)",
        stacklevel=6,  # the script, through Accelerator.log
    )
