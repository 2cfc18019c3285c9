"""Walks over nested data: tensors in any nesting of lists, tuples, namedtuples and mappings, whose types are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def is_torch_tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``torch.Tensor``."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether ``data`` looks like a namedtuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Collects ``generator`` into the type of ``obj``: a list, tuple or namedtuple."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Returns nested ``data`` with ``func(leaf, *args, **kwargs)`` in place of every leaf that passes ``test_type``.

    Other leaves are kept, or raise ``TypeError`` with ``error_on_other_type``.
    """

    def apply(node: Any) -> Any:
        if isinstance(node, (tuple, list)):
            return honor_type(node, (apply(child) for child in node))
        if isinstance(node, Mapping):
            return type(node)({key: apply(child) for key, child in node.items()})  # type: ignore[call-arg]
        if test_type(node):
            return func(node, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{func.__name__.strip('_')} takes lists, tuples and mappings of leaves that pass "
                f"{test_type.__name__}; found a leaf of type {type(node).__name__}"
            )
        return node

    return apply(data)
