"""What a device map is made from: the parts of a model, what it needs beside them, and the room of devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.device_memory import Memory, lowered
from accelerate_cpp.placement.first_fit import OFFLOADED, Device, Part, Placement, Room, place
from accelerate_cpp.placement.fitting import fit_on_accelerators, offloads
from accelerate_cpp.placement.model_parts import survey, with_inner
from accelerate_cpp.placement.module_sizes import Dtype, Measure, Size, class_names, compute_module_sizes
from accelerate_cpp.placement.tied_parameters import warn_of_untied
from accelerate_cpp.placement.workload import Workload, needs_of

__all__ = ["MapPlan", "rooms_of"]


class MapPlan:
    """A model whose parts can be placed in several ways; it may be on the meta device.

    Args:
        whole: names of classes of modules that are not split.
        dtype: what the weights will be converted to.
        special_dtypes: other dtypes for some of them, by name.
        workload: what room is left for in addition to the weights.
        caller: the function that a warning names.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: str | Collection[str] | None,
        dtype: Dtype | None,
        special_dtypes: Mapping[str, Dtype] | None,
        workload: Workload | None,
        caller: str,
    ) -> None:
        self._model, self._whole = model, class_names(whole)
        self._dtypes = dtype, special_dtypes
        self._needs = needs_of(model, workload, dtype)
        measure = Measure(dtype, special_dtypes)
        self._parts, self._ties, self._sizes = survey(model, measure, self._whole, self._needs.of_modules)
        warn_of_untied(model, self._ties, caller)

    def spared(self, memory: Memory) -> Memory:
        """``memory`` without what accelerators need in addition to the model; all other methods take it so.

        Raises:
            InvalidArgument: a device other than the disk has no end.
        """
        unlimited = next((device for device, size in memory.items() if size is None), None)
        if unlimited not in (None, "disk"):
            raise InvalidArgument(
                f"max_memory[{unlimited!r}] is None: expected a number of bytes or a text such as '10GB'"
            )
        everywhere = self._needs.everywhere
        return {device: size if device in OFFLOADED else max(0, size - everywhere) for device, size in memory.items()}

    def lowered(self, memory: Memory, low_zero: bool = False) -> Memory:
        """Memory as :func:`accelerate_cpp.utils.get_balanced_memory` lowers it, with what modules hold included."""
        sizes = compute_module_sizes(self._model, *self._dtypes)
        for name, size in with_inner(self._needs.of_modules).items():
            sizes[name] = sizes.get(name, 0) + size
        return lowered(memory, self._model, sizes, self._whole, low_zero)

    def first_fit(self, memory: Memory, fallback: bool = False, tell: Callable[[str], None] | None = None) -> Placement:
        """Devices are filled one after the other, as :func:`accelerate_cpp.placement.first_fit.place` does it.

        What offloaded parts hold in addition to their tensors is on the main device, where they run: room is kept for
        it there.
        """
        rooms = rooms_of(memory)
        main, kept = rooms[0], 0.0
        while True:
            result = place(self._parts, rooms, self._ties, self._sizes, fallback, tell)
            away = sum(_held(part, result.devices, {"cpu", "disk"} - {main.device}) for part in self._parts)
            if away <= kept or main.size is None:
                return result
            kept = away
            rooms[0] = replace(main, size=max(0, main.size - kept))

    def fit(self, memory: Memory) -> Placement | None:
        """Everything on the accelerators, in order and evenly if that fits; ``None`` if no way to do it was found."""
        return fit_on_accelerators(self._parts, rooms_of(memory), self._ties)

    def fit_instead(self, found: Placement, *memories: Memory) -> Placement:
        """``found``, or if that offloads something, what fits on the accelerators with the first possible room."""
        if not offloads(found):
            return found
        return next(filter(None, (self.fit(memory) for memory in memories)), found)


def rooms_of(memory: Memory) -> list[Room]:
    """The devices in order; the disk, which has no limit, comes last."""
    main = next((device for device in memory if device not in OFFLOADED), None)
    # Where an accelerator shares the machine's memory, weights on the CPU would take that of its own.
    reserving = {main, "cpu"} if main is None or isinstance(main, int) else {main}
    rooms = [Room(device, size, device in reserving) for device, size in memory.items() if device != "disk"]
    return [*rooms, Room("disk", None)]


def _held(part: Part, devices: Mapping[str, Device], where: Collection[Device]) -> Size:
    """Bytes that the portion of ``part`` on these devices holds in addition to its tensors."""
    if part.name in devices:
        return part.held_bytes if devices[part.name] in where else 0
    return sum(_held(inner, devices, where) for inner in part.parts)
