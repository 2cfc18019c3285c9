"""Fetching offloaded weights before the modules that need them run, while earlier modules compute.

Modules whose weights are in one :class:`OffloadedWeightsLoader` share what is here: each of them is a unit. In which
order units are needed is learned from pass to pass; the first time it is taken to be that of the model. What a module
computes with is the same with and without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate_cpp._native import AheadCopies, ReadAhead
from accelerate_cpp.checkpoint.files import parse_size
from accelerate_cpp.config import env_table
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, PrefixedDataset

__all__ = ["DeviceCopier", "FileReader", "Unit", "Wanted", "unit_of"]

_WINDOW = 512 * 1024**2
_NOTHING: Mapping[str, Tensor] = {}


class Wanted(NamedTuple):
    """A weight that a module needs.

    Attributes:
        name: its name in the module.
        key: its name in the weights of the model.
        dtype: what the module has it in.
    """

    name: str
    key: str
    dtype: torch.dtype


class _Engine(ABC):
    """What fetches the weights of units.

    Args:
        weights: where they are.
        window_bytes: the most that is fetched of units that have not come yet.
    """

    def __init__(self, weights: OffloadedWeightsLoader, window_bytes: int) -> None:
        self._weights, self._window_bytes = weights, window_bytes
        self._units: list[list[Wanted]] = []
        self._native: Any = None

    def add(self, wanted: Sequence[Wanted]) -> Unit | None:
        """A further unit; ``None`` if nothing of it has to be fetched."""
        if not wanted:
            return None
        self._units.append(list(wanted))
        self._native = None
        return Unit(self, len(self._units) - 1)

    @abstractmethod
    def arrive(self, number: int) -> Mapping[str, Tensor]:
        """Says that the weights of a unit are needed now. Gives those that were copied for it, by name."""

    def await_idle(self) -> None:
        """Returns when the window is full, or everything is there."""
        if self._native is not None:
            self._native.await_idle()

    @property
    def bytes_ahead(self) -> int:
        """How many bytes have been fetched of units that have not come yet."""
        return 0 if self._native is None else self._native.bytes_ahead

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process alone."""
        return {**self.__dict__, "_native": None}


class FileReader(_Engine):
    """Reads the weights of units from their files into memory, in a thread.

    At most a window of bytes is read before the units that need them; the system then keeps in memory what it has room
    for, once for all processes of the machine that use the files.
    """

    def add(self, wanted: Sequence[Wanted]) -> Unit | None:
        """A further unit; ``None`` if nothing of it is in files."""
        return super().add([each for each in wanted if each.key not in self._weights.state_dict])

    def arrive(self, number: int) -> Mapping[str, Tensor]:
        """Says that the weights of a unit are needed now; does not wait for them, and gives nothing."""
        if self._native is None:
            ranges = [[view for each in unit if (view := self._range(each.key))] for unit in self._units]
            self._native = ReadAhead(units=ranges, window_bytes=self._window_bytes)
        self._native.arrive(number)
        return _NOTHING

    def _range(self, key: str) -> tuple[int, int] | None:
        view = self._weights.view(key)
        return None if view is None else (view.data_ptr(), view.nbytes)


class DeviceCopier(_Engine):
    """Copies the weights of units to an accelerator, in a thread and on a stream of its own.

    At most a window of bytes is on the device before the units that need them.

    Args:
        weights: where they are, in memory or in files.
        device: with a number.
        window_bytes: of units that have not come yet.
    """

    def __init__(self, weights: OffloadedWeightsLoader, device: torch.device, window_bytes: int) -> None:
        super().__init__(weights, window_bytes)
        self._device = device
        self._sources: list[list[Tensor]] = []

    def arrive(self, number: int) -> Mapping[str, Tensor]:
        """The copies of the weights of a unit, by the names that the module has for them; none if there are none."""
        if self._native is None or not self._are_those(number):
            self._sources = [[self._source(each.key) for each in unit] for unit in self._units]
            pairs = zip(self._units, self._sources, strict=True)
            units = [
                [(source, each.dtype) for each, source in zip(unit, sources, strict=True)] for unit, sources in pairs
            ]
            self._native = AheadCopies(units=units, device=self._device, window_bytes=self._window_bytes)
        copies = self._native.take(number)
        names = [each.name for each in self._units[number]]
        return dict(zip(names, copies, strict=True)) if copies else _NOTHING

    def _source(self, key: str) -> Tensor:
        view = self._weights.view(key)
        return self._weights[key] if view is None else view

    def _are_those(self, number: int) -> bool:
        """Whether the weights of a unit are still the tensors that copies were made of."""
        state = self._weights.state_dict
        pairs = zip(self._units[number], self._sources[number], strict=True)
        return all(each.key not in state or state[each.key] is source for each, source in pairs)

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process alone."""
        return {**super().__getstate__(), "_sources": []}


class Unit:
    """The weights of one module.

    Args:
        engine: what fetches them.
        number: of the unit.
    """

    __slots__ = ("engine", "number")

    def __init__(self, engine: _Engine, number: int) -> None:
        self.engine, self.number = engine, number

    def arrive(self) -> Mapping[str, Tensor]:
        """Says that the module runs now; gives copies of its weights on its device, if they were made."""
        return self.engine.arrive(self.number)


def unit_of(weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], device: torch.device) -> Unit | None:
    """A unit for a module that computes on ``device``; ``None`` if nothing is fetched for it.

    On the CPU weights are read from files, up to 512 MiB ahead, or what ``ACCELERATE_CPP_OFFLOAD_WINDOW`` says. To
    accelerators they are copied ahead only where that is set, as it has been tried on one GPU alone.

    Args:
        weights: all that there are, maybe behind a prefix.
        dtypes: of the weights that the module needs, by name.
    """
    prefix = ""
    while isinstance(weights, PrefixedDataset):
        prefix, weights = weights.prefix + prefix, weights.dataset
    window = _window(device)
    if not isinstance(weights, OffloadedWeightsLoader) or not dtypes or not window:
        return None
    wanted = [Wanted(name, prefix + name, dtype) for name, dtype in dtypes.items()]
    return _engine(weights, device, window).add(wanted)


def _window(device: torch.device) -> int:
    text = env_table.OFFLOAD_WINDOW.get()
    if text is None:
        return _WINDOW if device.type == "cpu" else 0
    return int(text) if text.isdecimal() else parse_size(text, argument=env_table.OFFLOAD_WINDOW.name)


def _engine(weights: OffloadedWeightsLoader, device: torch.device, window: int) -> _Engine:
    device = torch.empty(0, device=device).device  # with its number
    engine: _Engine | None = weights.engines.get(device)
    if engine is None:
        is_cpu = device.type == "cpu"
        engine = FileReader(weights, window) if is_cpu else DeviceCopier(weights, device, window)
        weights.engines[device] = engine
    return engine
