"""Walks over nested data: tensors in any nesting of lists, tuples, namedtuples and mappings, whose types are kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument


def is_torch_tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``torch.Tensor``."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether ``data`` looks like a namedtuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Collects ``generator`` into the type of ``obj``: a list, tuple or namedtuple."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def rebuild_mapping(mapping: Any, entries: dict[Any, Any]) -> Any:
    """``entries`` in a mapping of the type of ``mapping``; a ``defaultdict`` keeps its factory."""
    if isinstance(mapping, defaultdict):
        return type(mapping)(mapping.default_factory, entries)
    return type(mapping)(entries)


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
            return rebuild_mapping(node, {key: apply(child) for key, child in node.items()})
        if test_type(node):
            return func(node, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"Unsupported types ({type(node)}) passed to `{func.__name__}`: it takes lists, tuples and mappings of "
                f"leaves that pass {test_type.__name__}"
            )
        return node

    return apply(data)


def leaves_of(data: Any) -> Iterator[Any]:
    """What nested ``data`` holds that is not a container, in the order in which :func:`recursively_apply` visits it."""
    if isinstance(data, (tuple, list)):
        for child in data:
            yield from leaves_of(child)
    elif isinstance(data, Mapping):
        for child in data.values():
            yield from leaves_of(child)
    else:
        yield data


def apply_to_all(func: Callable[[list[torch.Tensor]], Sequence[Any]], data: Any, operation: str) -> Any:
    """Returns nested ``data`` with the results of one ``func(tensors)`` in place of its tensors.

    A leaf that is not a tensor raises ``TypeError``, whose message names ``operation``.
    """
    tensors = list(leaves_of(data))
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"Unsupported types ({type(leaf)}) passed to `{operation}`: it takes tensors in lists, tuples and "
                "mappings"
            )
    results = iter(func(tensors))
    return recursively_apply(lambda _: next(results), data)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor in nested ``data``, or ``None`` if there is none."""
    if isinstance(data, torch.Tensor):
        return data.device
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (tuple, list)):
        return None
    return next((device for child in data if (device := find_device(child)) is not None), None)


def find_batch_size(data: Any) -> int:
    """Size of dimension 0 of the first tensor in nested ``data``; ``ValueError`` or ``TypeError`` if there is none."""
    if isinstance(data, (tuple, list, Mapping)):
        if len(data) == 0:
            raise InvalidArgument(f"an empty {type(data).__name__} has no batch size")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"the batch size is dimension 0 of the first tensor; found a {type(data).__name__} first")
    if data.ndim == 0:
        raise InvalidArgument("the batch size is dimension 0 of the first tensor, which has no dimension: it is 0-dim")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """:func:`find_batch_size`, but ``None`` where that raises ``ValueError`` or ``TypeError``."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None
