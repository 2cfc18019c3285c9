"""Maps of random small models against all maps there are; sizes, ties and blocks that stay whole are found anew."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_cpp.placement.device_map import check_device_map, choose_device_map, infer_auto_device_map
from accelerate_cpp.placement.device_memory import get_balanced_memory
from accelerate_cpp.placement.first_fit import device_of

OTHER_WAYS = ("auto", "balanced_low_0", "sequential")


@pytest.fixture(autouse=True)
def _without_logs_of_absent_gpus() -> Iterator[None]:
    """The maps name GPUs that this machine need not have."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Block(nn.Module): ...


class Whole(nn.Module): ...


class Case:
    """A random model of at most nine parts, options for its map, and what they come to, found without the package."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._left = self.random.randint(2, 9)
        self.model = Block()
        self._fill(self.model, 3)
        self._tie()
        self.dtype = self.random.choice([None, torch.float16])
        self.special: dict[str, torch.dtype] = {}
        names = [name for name, _ in self.model.named_parameters()]
        if names and self.random.random() < 0.3:
            self.special = {self.random.choice(names): torch.float64}
        self.parts = list(self._parts("", self.model))
        self.groups = self._group()
        self.sizes = [self._bytes(group) for group in self.groups]
        self.capacities = self._capacities()

    def _fill(self, module: nn.Module, depth: int) -> None:
        choose = self.random
        if choose.random() < 0.3:
            self._add(module, "own", nn.Parameter(torch.zeros(choose.randint(1, 20), device="meta")))
        for number in range(choose.randint(1, 3)):
            if not self._left:
                return
            kind = choose.random()
            if depth and kind < 0.5:
                child = Whole() if choose.random() < 0.3 else Block()
                self._fill(child, depth - 1)
                setattr(module, f"m{number}", child)
            elif kind < 0.6:
                self._add(module, f"m{number}", nn.ReLU())
            else:
                size = choose.choice([3, 4, 4, 5])
                self._add(module, f"m{number}", nn.Linear(size, choose.choice([2, 3, 4]), bias=False, device="meta"))
        if choose.random() < 0.15:
            module.register_buffer("saved", torch.zeros(choose.randint(1, 5), device="meta", dtype=torch.int32))

    def _add(self, module: nn.Module, name: str, part: Any) -> None:
        if self._left:
            self._left -= 1
            setattr(module, name, part)

    def _tie(self) -> None:
        """Up to two groups of layers share their weights."""
        layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        for _ in range(self.random.choice([0, 1, 1, 2])):
            first = self.random.choice(layers) if layers else None
            alike = [layer for layer in layers if first is not None and layer.weight.shape == first.weight.shape]
            for layer in self.random.sample(alike, self.random.randint(0, len(alike))):
                assert first is not None
                layer.weight = first.weight

    def _parts(self, name: str, module: nn.Module) -> Iterator[str]:
        children = list(module.named_children())
        if name and (not children or isinstance(module, Whole)):
            yield name
            return
        prefix = f"{name}." if name else ""
        yield from (prefix + label for label, _ in module.named_parameters(recurse=False))
        for label, child in children:
            yield from self._parts(prefix + label, child)
        yield from (prefix + label for label, _ in module.named_buffers(recurse=False))

    def _tensors(self, part: str) -> dict[int, tuple[str, Tensor]]:
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        first = {id(tensor): name for name, tensor in reversed(named)}
        inside = [tensor for name, tensor in named if f"{name}.".startswith(f"{part}.")]
        return {id(tensor): (first[id(tensor)], tensor) for tensor in inside}

    def _group(self) -> list[list[str]]:
        """The parts that share a tensor, in the order of the first of each group."""
        groups: list[tuple[list[str], set[int]]] = []
        for part in self.parts:
            keys = {*self._tensors(part)}
            sharing = [group for group in groups if group[1] & keys]
            if sharing:
                for names, others in sharing[1:]:
                    sharing[0][0].extend(names)
                    sharing[0][1].update(others)
                    groups.remove((names, others))
                sharing[0][0].append(part)
                sharing[0][1].update(keys)
            else:
                groups.append(([part], keys))
        return [names for names, _ in groups]

    def _bytes(self, group: list[str]) -> int:
        tensors = {key: pair for part in group for key, pair in self._tensors(part).items()}
        total = 0
        for name, tensor in tensors.values():
            size = tensor.element_size()
            if name in self.special:
                size = 8
            elif self.dtype is not None and tensor.is_floating_point():
                size = 2
            total += tensor.numel() * size
        return total

    def _capacities(self) -> list[int]:
        total = sum(self.sizes)
        count = self.random.randint(1, 3)
        if self.random.random() < 0.4:
            return [2 * total] * count
        return [self.random.randint(1, max(1, int(1.6 * total / count))) for _ in range(count)]

    def options(self) -> dict[str, Any]:
        room = dict(enumerate(self.capacities)) | {"cpu": 10**6}
        return {
            "max_memory": room,
            "no_split_module_classes": ["Whole"],
            "dtype": self.dtype,
            "special_dtypes": self.special,
        }

    def loads(self, devices: tuple[int, ...]) -> list[int]:
        return [
            sum(size for size, device in zip(self.sizes, devices, strict=True) if device == number)
            for number in range(len(self.capacities))
        ]

    def fits(self, devices: tuple[int, ...]) -> bool:
        return all(load <= room for load, room in zip(self.loads(devices), self.capacities, strict=True))

    def all_in_order(self) -> list[tuple[int, ...]]:
        ways = itertools.combinations_with_replacement(range(len(self.capacities)), len(self.sizes))
        return [devices for devices in ways if self.fits(devices)]

    def fits_somehow(self) -> bool:
        ways = itertools.product(range(len(self.capacities)), repeat=len(self.sizes))
        return any(self.fits(devices) for devices in ways)

    def count_split(self, devices: tuple[int, ...]) -> int:
        """How many modules have parts on several devices."""
        device = {part: devices[number] for number, group in enumerate(self.groups) for part in group}
        modules = [name for name, _ in self.model.named_modules() if name]
        return sum(
            len({place for part, place in device.items() if part.startswith(f"{name}.")}) > 1 for name in modules
        )

    def devices_in(self, device_map: Any) -> tuple[Any, ...]:
        """The device of each group; its parts have the same."""
        places = [{device_of(device_map, part) for part in group} for group in self.groups]
        assert all(len(place) == 1 for place in places)
        return tuple(place.pop() for place in places)


def is_offloaded(device_map: Any) -> bool:
    return bool({"cpu", "disk"} & {*device_map.values()})


def test_balanced_maps_are_the_best_of_all_in_order() -> None:
    in_order = with_tolerance = split = 0
    for seed in range(2200):
        case = Case(seed)
        ways = case.all_in_order()
        if not ways:
            continue
        in_order += 1
        found = choose_device_map(case.model, "balanced", **case.options(), offload_buffers=True)
        check_device_map(case.model, found)
        devices = case.devices_in(found)
        least = max(sum(case.sizes) / len(case.capacities), *case.sizes)
        smallest = min(max(case.loads(way)) for way in ways)
        limit = max(smallest, 1.05 * least)
        good = [way for way in ways if max(case.loads(way)) <= limit]
        fewest = min(case.count_split(way) for way in good)
        assert devices in good, (seed, devices)
        assert case.count_split(devices) == fewest, (seed, devices)
        squares = [sum(load**2 for load in case.loads(way)) for way in good if case.count_split(way) == fewest]
        assert sum(load**2 for load in case.loads(devices)) == min(squares), (seed, devices)
        with_tolerance += max(case.loads(devices)) > smallest
        split += fewest > 0
    assert in_order >= 1000
    assert with_tolerance >= 3
    assert split >= 100


def test_nothing_is_offloaded_by_any_way_where_a_fit_exists() -> None:
    out_of_order = without_fit = 0
    for seed in range(1500):
        case = Case(seed)
        options = case.options()
        exists = case.fits_somehow()
        maps = {
            way: choose_device_map(case.model, way, **options, offload_buffers=True)
            for way in ("balanced", *OTHER_WAYS)
        }
        maps["infer"] = infer_auto_device_map(case.model, **options, offload_buffers=True)
        for way, found in maps.items():
            assert is_offloaded(found) != exists, (seed, way)
            if exists:
                assert case.fits(case.devices_in(found)), (seed, way)
        if not exists:
            without_fit += 1
            memory = get_balanced_memory(case.model, **options)
            as_before = infer_auto_device_map(case.model, **{**options, "max_memory": memory}, offload_buffers=True)
            assert maps["balanced"] == maps["auto"] == as_before, seed
        out_of_order += exists and not case.all_in_order()
    assert out_of_order >= 10
    assert without_fit >= 100
