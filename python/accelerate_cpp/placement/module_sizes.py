"""How many bytes modules take. Every tensor is looked at once, and parameters that are shared count once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.first_fit import prefixes
from accelerate_cpp.placement.module_tensors import dtype_byte_size, walk
from accelerate_cpp.plugins.enums import CustomDtype

__all__ = [
    "Measure",
    "calculate_maximum_sizes",
    "class_names",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "get_max_layer_size",
    "top_parts",
]

Size = float
"""Bytes; whole numbers unless elements are smaller than a byte."""

Dtype = torch.dtype | CustomDtype | str


def class_names(names: str | Collection[str | None] | None) -> frozenset[str]:
    """The names of classes that a caller gives as one, several or ``None``."""
    if names is None or isinstance(names, str):
        return frozenset() if names is None else frozenset({names})
    return frozenset(name for name in names if name is not None)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, Size]:
    """Bytes of every parameter, buffer and module in ``model``, by dotted name; ``""`` is the whole.

    A tensor with several names counts under the first. Other names give 0.

    Args:
        dtype: what parameters and buffers will be converted to. It makes none larger; integers and booleans stay.
        special_dtypes: for tensors of these names another dtype, which may be larger.
        buffers_only: leave out parameters.

    Raises:
        InvalidArgument: something is not a dtype.
    """
    measure = Measure(dtype, special_dtypes)
    sizes: dict[str, Size] = defaultdict(int)
    met: set[int] = set()
    for prefix, module in walk(model):
        new: dict[str, Size] = {}
        for tensors in (module._buffers,) if buffers_only else (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in met:
                    met.add(id(tensor))
                    new[prefix + name] = measure(tensor, prefix, name)
        if new:
            sizes.update(new)
            total = sum(new.values())
            sizes[""] += total
            for path in prefixes(prefix[:-1]):
                sizes[path] += total
    return sizes


class Measure:
    """The bytes that a tensor takes once it is converted.

    Args:
        dtype: as :func:`compute_module_sizes` takes it.
        special_dtypes: too.
    """

    def __init__(self, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None) -> None:
        self._limit = math.inf if dtype is None else dtype_byte_size(dtype)
        self._special = {name: dtype_byte_size(kind) for name, kind in (special_dtypes or {}).items()}
        self._element_bytes: dict[torch.dtype, Size] = {}

    def __call__(self, tensor: Tensor, prefix: str, name: str) -> Size:
        """Bytes of ``tensor``, whose name in the model is ``name`` with ``prefix`` in front."""
        if self._special and prefix + name in self._special:
            return tensor.numel() * self._special[prefix + name]
        dtype = tensor.dtype
        size = self._element_bytes.get(dtype)
        if size is None:
            own = dtype_byte_size(dtype)
            size = min(own, self._limit) if dtype.is_floating_point or dtype.is_complex else own
            self._element_bytes[dtype] = size
        return tensor.numel() * size


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> Size:
    """Bytes of all buffers of ``model``; the arguments are those of :func:`compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def top_parts(model: nn.Module) -> list[tuple[str, Any]]:
    """What ``model`` is made of at first sight: its own parameters, its modules, its own buffers."""
    own = list(model.named_parameters(recurse=False))
    return [*own, *model.named_children(), *model.named_buffers(recurse=False)]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | Tensor]],
    module_sizes: Mapping[str, Size],
    no_split_module_classes: str | Collection[str] | None,
) -> tuple[Size, list[str]]:
    """Bytes of the largest layer in ``modules``, and the names of all layers that are as large.

    Layers are modules without modules in them, modules of ``no_split_module_classes``, and tensors.

    Raises:
        InvalidArgument: ``module_sizes`` lacks a layer.
    """
    whole = class_names(no_split_module_classes)
    largest: Size = 0
    names: list[str] = []
    for name, layer in modules:
        for layer_name in _layer_names(name, layer, whole):
            if layer_name not in module_sizes and not isinstance(module_sizes, defaultdict):
                raise InvalidArgument(f"module_sizes has no entry {layer_name!r}: is it of another model?")
            size = module_sizes[layer_name]
            if size > largest:
                largest, names = size, []
            if size == largest:
                names.append(layer_name)
    return largest, names


def _layer_names(name: str, layer: nn.Module | Tensor, whole: frozenset[str]) -> Iterator[str]:
    children = dict(layer.named_children()) if isinstance(layer, nn.Module) else {}
    if not children or type(layer).__name__ in whole:
        yield name
        return
    for child_name, child in children.items():
        yield from _layer_names(f"{name}.{child_name}" if name else child_name, child, whole)


def calculate_maximum_sizes(model: nn.Module) -> tuple[Size, tuple[Size, list[str]]]:
    """Bytes of ``model``, and its largest layer as :func:`get_max_layer_size` gives it.

    Modules of the classes in ``model._no_split_modules`` are one layer each.
    """
    sizes = compute_module_sizes(model)
    whole: Any = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(top_parts(model), sizes, whole)
