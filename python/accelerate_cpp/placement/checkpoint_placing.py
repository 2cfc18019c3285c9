"""One loading of a checkpoint: all tensors are checked first, and then put into their places one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.devices.memory import should_reduce_batch_size
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.checkpoint_reading import CheckpointFile
from accelerate_cpp.placement.first_fit import device_of, is_in_one_of
from accelerate_cpp.placement.module_tensors import as_device, is_meta, listed, placed_parameter, walk
from accelerate_cpp.placement.offload import FolderWriter
from accelerate_cpp.placement.quantized_parameters import quantized, quantizes

__all__ = ["Loading"]

Device = int | str | torch.device
_CPU, _META = torch.device("cpu"), torch.device("meta")
_EXTRA_STATE = "_extra_state"  # torch's name for what modules save besides tensors


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the model."""

    tensors: dict[str, Any]
    label: str
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        """The current value."""
        tensor: Tensor = self.tensors[self.label]
        return tensor


class Loading:
    """One loading of a checkpoint into a model.

    Args:
        ties: groups of names of parameters of ``model`` that are one; of each group the checkpoint needs one.
        device_map: where tensors go; ``None`` leaves them where they are, and puts those without values on the CPU.
        dtype: what floating-point tensors are converted to; ``None`` is what they have in the model.
        in_fp32: names of modules that are converted to fp32 when others are to ``dtype``.
        offload_buffers: buffers go to the disk, too.

    Attributes:
        lacking: names of tensors without values that the checkpoint lacks, known after :meth:`check`.
        empty: names of tensors that have no values after loading.
    """

    def __init__(
        self,
        model: nn.Module,
        ties: Sequence[Sequence[str]],
        device_map: Mapping[str, Device] | None,
        dtype: torch.dtype | None,
        in_fp32: Collection[str],
        offload_buffers: bool,
    ) -> None:
        self._model, self._device_map, self._dtype, self._in_fp32 = model, device_map, dtype, in_fp32
        self._offload_buffers = offload_buffers
        self._places: dict[str, _Place] = {}
        self._unsaved: dict[str, _Place] = {}
        self._extra: dict[str, nn.Module] = {}
        self._group_of = {name: group for group in map(tuple, ties) for name in group}
        self._copies: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        self._devices: dict[str, torch.device | None] = {}
        self._before: list[tuple[_Place, Tensor]] = []
        self.lacking: list[str] = []
        self._find_places()

    def _find_places(self) -> None:
        for prefix, module in walk(self._model):
            for label, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[prefix + label] = _Place(module._parameters, label, False)
            for label, buffer in module._buffers.items():
                if buffer is not None:
                    unsaved = label in module._non_persistent_buffers_set
                    places = self._unsaved if unsaved else self._places
                    places[prefix + label] = _Place(module._buffers, label, True)
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self._extra[prefix + _EXTRA_STATE] = module

    @property
    def empty(self) -> list[str]:
        """Names of tensors that should have values and have none, neither in memory nor on the disk."""
        return [
            name
            for name, place in {**self._places, **self._unsaved}.items()
            if is_meta(place.tensor) and self._devices.get(name, _CPU) not in (None, _META)
        ]

    def check(self, files: Iterable[CheckpointFile], strict: bool) -> list[str]:
        """Looks at all headers, and returns the names of tensors that the model has no place for.

        Raises:
            InvalidArgument: what cannot be loaded; the message names it.
        """
        shapes = {name: file.shape(name) for file in files for name in file}
        unused = [
            name
            for name in shapes
            if name not in self._places and name not in self._extra and not self._is_of_8_bits(name)
        ]
        missing = [name for name in [*self._places, *self._extra] if not self._is_in(name, shapes)]
        self.lacking = [name for name in missing if name in self._places and is_meta(self._places[name].tensor)]
        if strict and (missing or unused):
            raise InvalidArgument(
                f"strict=True: the checkpoint lacks {listed(missing)}; its additional entries: {listed(unused)}; load "
                f"it into the model that it was saved from ({type(self._model).__name__} seems to be another one), or "
                "pass strict=False"
            )
        wrong = [
            f"{name} has {tuple(place.tensor.shape)}, in the checkpoint {shapes[name]}"
            for name, place in self._places.items()
            if name in shapes and shapes[name] != tuple(place.tensor.shape)
        ]
        if wrong:
            raise InvalidArgument(f"other shapes than those of {type(self._model).__name__}: {listed(wrong)}")
        self._choose_devices(name for name in self._places if self._is_in(name, shapes))
        self._sources = shapes.keys()
        return unused

    def _is_of_8_bits(self, name: str) -> bool:
        """Whether ``name`` is an entry that a bitsandbytes layer saves in addition to its weight."""
        prefix, _, label = name.rpartition(".")
        place = self._places.get(f"{prefix}.weight")
        return label in ("SCB", "weight_format") and place is not None and quantizes(place.tensor)

    def _is_in(self, name: str, checkpoint: Collection[str]) -> bool:
        return name in checkpoint or any(other in checkpoint for other in self._group_of.get(name, ()))

    def _choose_devices(self, names: Iterable[str]) -> None:
        """The device of each tensor; ``None`` for the disk."""
        homeless: list[str] = []
        known: dict[Device, torch.device] = {}
        for name in names:
            place = self._places[name]
            if self._device_map is None:
                self._devices[name] = _CPU if is_meta(place.tensor) else place.tensor.device
                continue
            device = device_of(self._device_map, name)
            if device is None:
                homeless.append(name)
            elif device == "disk":
                self._devices[name] = _CPU if place.is_buffer and not self._offload_buffers else None
            else:
                known[device] = known[device] if device in known else as_device(device)
                self._devices[name] = known[device]
        if homeless:
            raise InvalidArgument(f"device_map gives no device to {listed(homeless)}")

    def load(self, files: Iterable[CheckpointFile], writer: FolderWriter | None) -> None:
        """Loads all tensors; after an error those that had no values have none again.

        Args:
            writer: takes what goes to the disk.

        Raises:
            CheckpointError: a tensor cannot be read.
            SystemFailure: the disk is full.
            torch.OutOfMemoryError: a device has no room.
        """
        try:
            for file in files:
                for name in file:
                    self._load_one(file, name, writer)
        except BaseException:
            for place, tensor in reversed(self._before):
                place.tensors[place.label] = tensor
            raise

    def _load_one(self, file: CheckpointFile, name: str, writer: FolderWriter | None) -> None:
        if name in self._extra:
            self._extra[name].set_extra_state(file.read(name))
        targets = [other for other in self._group_of.get(name, ()) if other != name and other not in self._sources]
        value: Tensor | None = None
        for target in [name, *targets] if name in self._places else []:
            device = self._devices[target]
            copy = self._copies.get((self._group_of.get(target, ()), device or _META))
            if copy is None or device is None:
                value = file.read(name) if value is None else value
                placed = self._placed(target, value, writer, file)
                copy = placed if copy is None else copy
            self._put(target, copy)

    def _placed(self, name: str, value: Tensor, writer: FolderWriter | None, file: CheckpointFile) -> Tensor:
        """``value`` in the form that the model stores."""
        old, device, dtype = self._places[name].tensor, self._devices[name], self._dtype_of(name, value)
        if self._device_map is None and not is_meta(old) and dtype == old.dtype:
            with torch.no_grad():
                return old.copy_(value)
        with _naming(name, value, device or _CPU):
            if device is not None and quantizes(old):
                scales = name.removesuffix("weight") + "SCB"
                return quantized(old, value.to(dtype), device, file.read(scales) if scales in file else None)
            new = value.detach().to(device=device or _CPU, dtype=dtype)
        if device is None:
            assert writer is not None
            writer.write(name, new)
            new = new.to(_META)
        return placed_parameter(old, new) if isinstance(old, nn.Parameter) else new

    def _put(self, name: str, tensor: Tensor) -> None:
        place = self._places[name]
        if is_meta(place.tensor):
            self._before.append((place, place.tensor))
        place.tensors[place.label] = tensor
        if name in self._group_of:
            self._copies[self._group_of[name], self._devices[name] or _META] = tensor

    def _dtype_of(self, name: str, value: Tensor) -> torch.dtype:
        if self._dtype is None:
            return self._places[name].tensor.dtype
        if not value.is_floating_point():
            return value.dtype
        if is_in_one_of(name, self._in_fp32):
            return torch.float32
        return self._dtype


@contextmanager
def _naming(name: str, value: Tensor, device: torch.device) -> Iterator[None]:
    """Adds the name of the tensor to an out-of-memory error."""
    try:
        yield
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        raise torch.OutOfMemoryError(
            f"no room on {device} for {name!r} of {tuple(value.shape)}, {value.nbytes} bytes in the checkpoint; free "
            "memory there, or give the device less by device_map or max_memory"
        ) from error
