"""A model as the placement of models sees it: named parts of some size, and which tensors are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from accelerate_cpp.placement.first_fit import Part, prefixes
from accelerate_cpp.placement.module_sizes import Measure, Size

__all__ = ["Survey", "survey"]


class Survey(NamedTuple):
    """What :func:`survey` found.

    Attributes:
        parts: of the whole model: its own parameters, its modules, its own buffers.
        ties: groups of names of parameters that are one, each sorted.
        sizes: bytes of the parameters in these groups, by name; those that count under another name are not there.
    """

    parts: list[Part]
    ties: list[list[str]]
    sizes: dict[str, Size]


def survey(model: nn.Module, measure: Measure, whole: frozenset[str], held: Mapping[str, Size] | None = None) -> Survey:
    """Walks over ``model`` once.

    Args:
        measure: gives the bytes of a tensor.
        whole: names of classes of modules that are not split.
        held: bytes that modules need in addition to their tensors, by name. Of a module that is split they count in its
            first part.
    """
    walk = _Walk(measure, whole)
    root = walk.part("", model, is_root=True)
    ties = [[prefix + name for prefix, name, _ in group] for group in walk.shared.values()]
    sizes = {prefix + name: size for group in walk.shared.values() for prefix, name, size in group if size}
    if held:
        _hold(root, held, with_inner(held), 0)
    return Survey(root.parts, [sorted(group) for group in ties], sizes)


def with_inner(sizes: Mapping[str, Size]) -> dict[str, Size]:
    """For each module the sum of ``sizes`` of all modules in it, and its own; ``""`` is the sum of all."""
    sums: dict[str, Size] = {}
    for name, size in sizes.items():
        for path in (*prefixes(name), ""):
            sums[path] = sums.get(path, 0) + size
    return sums


def _hold(part: Part, held: Mapping[str, Size], sums: Mapping[str, Size], carried: Size) -> None:
    """Adds to ``part`` what it holds, and ``carried``, what the modules around it do."""
    part.held_bytes = sums.get(part.name, 0) + carried
    part.size += part.held_bytes
    carried += held.get(part.name, 0)
    for inner in part.parts:
        _hold(inner, held, sums, carried)
        carried = 0


class _Walk:
    """One walk; ``shared`` then has, by the id of a parameter with several names, prefix, name and bytes of each."""

    def __init__(self, measure: Measure, whole: frozenset[str]) -> None:
        self._measure, self._whole = measure, whole
        self._met: dict[int, tuple[str, str, Size]] = {}
        self.shared: dict[int, list[tuple[str, str, Size]]] = {}

    def part(self, name: str, module: nn.Module, is_root: bool = False) -> Part:
        """A module and, if it can be split, its parts.

        Its own buffers are among these if they are in the state dict; others follow it without an entry of their own
        in a device map. Of the root all are, as in the original.
        """
        prefix = f"{name}." if name else ""
        parameters = self._new(prefix, module._parameters, self.shared) if module._parameters else {}
        buffers = self._new(prefix, module._buffers, {}) if module._buffers else {}
        buffer_bytes = sum(buffers.values()) if buffers else 0
        part = Part(name, sum(parameters.values()) + buffer_bytes, buffer_bytes=buffer_bytes)
        modules = [self.part(prefix + label, child) for label, child in _children(module)] if module._modules else []
        if not modules and not is_root:
            return part
        for inner in modules:
            part.size += inner.size
            part.buffer_bytes += inner.buffer_bytes
        if is_root or (type(module).__name__ not in self._whole):
            skipped = () if is_root else module._non_persistent_buffers_set
            own = [Part(prefix + label, size, is_module=False) for label, size in parameters.items()]
            saved = [Part(prefix + label, buffers[label], is_module=False) for label in buffers if label not in skipped]
            part.parts = [*own, *modules, *saved]
        return part

    def _new(
        self, prefix: str, tensors: Mapping[str, Tensor | None], shared: dict[int, list[tuple[str, str, Size]]]
    ) -> dict[str, Size]:
        """Bytes of ``tensors`` by name; 0 for those that were met before, which are noted in ``shared``."""
        sizes: dict[str, Size] = {}
        for name, tensor in tensors.items():
            if tensor is not None:
                key = id(tensor)
                first = self._met.get(key)
                if first is None:
                    sizes[name] = size = self._measure(tensor, prefix, name)
                    self._met[key] = (prefix, name, size)
                else:
                    sizes[name] = 0
                    shared.setdefault(key, [first]).append((prefix, name, 0))
        return sizes


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules in ``module``; of one that has two names the second only if it has tensors, which need a device."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    for name, child in module._modules.items():
        if child is not None and (id(child) not in seen or child.state_dict()):
            found.append((name, child))
            seen.add(id(child))
    return found
