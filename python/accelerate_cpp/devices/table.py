"""The kinds of devices: one row each, and those that installed packages bring."""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from accelerate_cpp.config import env_table
from accelerate_cpp.devices.cores import gpu_nodes
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.host_memory import available_bytes
from accelerate_cpp.devices.xla import XlaDevice
from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINTS = "accelerate_cpp.devices"
"""The group of entry points by which packages bring devices: the name is torch's type, the value a :class:`Device`."""


class Cpu(Device):
    """The host itself. It has one device, which has no index, and torch's CPU generator is not among its states."""

    def module(self) -> Any | None:
        return torch.cpu

    def current(self) -> int:
        return 0

    def set_current(self, index: int) -> None:
        pass

    def name_of(self, index: int) -> str:
        return platform.processor() or platform.machine()

    def free_bytes(self, index: int) -> int:
        return available_bytes()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def random_states(self) -> list[Tensor]:
        return [torch.get_rng_state()]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])

    def lacks(self, precision: str, device: torch.device) -> str | None:
        return None


class Cuda(Device):
    """GPUs of NVIDIA and, through ROCm, of AMD."""

    def is_available(self) -> bool:
        return self.count() > 0

    def count(self) -> int:
        try:
            return int(torch.cuda.device_count())  # asks NVML if it can, which does not initialise the driver
        except RuntimeError:
            return 0

    def lacks(self, precision: str, device: torch.device) -> str | None:
        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            return f"{self.name_of(device.index or 0)} does not support bf16"
        if precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
            major, minor = torch.cuda.get_device_capability(device)
            return (
                f"{self.name_of(device.index or 0)} has compute capability {major}.{minor}, but fp8 needs 8.9 or higher"
            )
        return None

    def numa_nodes(self, environ: Mapping[str, str]) -> Sequence[int | None]:
        return gpu_nodes(environ)


class Mps(Device):
    """The GPU of a Mac: one, which shares the machine's memory. Operations that it lacks run on the CPU."""

    def is_available(self) -> bool:
        return torch.backends.mps.is_built() and torch.backends.mps.is_available()

    def count(self) -> int:
        return 1 if self.is_available() else 0

    def prepare_use(self) -> None:
        # torch reads it when it is loaded, so this serves processes that start from here. Launchers set it for workers.
        if not env_table.MPS_FALLBACK.is_set():
            env_table.export({env_table.MPS_FALLBACK: True})

    def current(self) -> int:
        return 0

    def set_current(self, index: int) -> None:
        pass

    def name_of(self, index: int) -> str:
        return platform.processor() or "Apple GPU"

    def free_bytes(self, index: int) -> int:
        return available_bytes()

    def allocated_bytes(self, index: int | None = None) -> int:
        return int(torch.mps.current_allocated_memory())

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def random_states(self) -> list[Tensor]:
        return [torch.mps.get_rng_state()]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.mps.set_rng_state(states[0])

    def lacks(self, precision: str, device: torch.device) -> str | None:
        if precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
            return "bf16 on the GPU of a Mac needs macOS 14"
        return None


class Hpu(Device):
    """Gaudi. A process acquires one device, which it calls number 0."""

    def empty_cache(self) -> None:
        """Nothing: a process keeps all memory of its device."""

    def is_first_generation(self) -> bool:
        """Whether the devices of this machine are of the first generation, which has no fp16."""
        experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
        return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)

    def lacks(self, precision: str, device: torch.device) -> str | None:
        if precision == "fp16" and self.is_first_generation():
            return f"{self.title} of the first generation ({device}) does not support fp16"
        return super().lacks(precision, device)


_ROWS: tuple[Device, ...] = (
    # Best first. A kind that a package has to be installed for comes before the GPUs that torch finds by itself: such
    # packages may show themselves as CUDA, too.
    XlaDevice(
        type="xla",
        title="TPU",
        distributed_type="XLA",
        collectives="xla",
        package="torch_xla.runtime",
        index_by_rank=False,
        numbered=False,
        has_streams=False,
        pins_memory=False,
        half_precisions=frozenset({"bf16"}),
        init_method="xla://",
        counts_alone=True,
    ),
    Device(type="mlu", title="Cambricon MLU", distributed_type="MULTI_MLU", collectives="cncl", package="torch_mlu"),
    Device(
        type="sdaa", title="Tecorigin SDAA", distributed_type="MULTI_SDAA", collectives="tccl", package="torch_sdaa"
    ),
    Device(
        type="musa",
        title="Moore Threads GPU",
        distributed_type="MULTI_MUSA",
        collectives="mccl",
        package="torch_musa",
        has_tf32=True,
    ),
    Device(type="npu", title="Ascend NPU", distributed_type="MULTI_NPU", collectives="hccl", package="torch_npu"),
    Hpu(
        type="hpu",
        title="Gaudi",
        distributed_type="MULTI_HPU",
        collectives="hccl",
        package="habana_frameworks.torch",
        index_by_rank=False,
    ),
    Cuda(type="cuda", title="NVIDIA or AMD GPU", has_tf32=True),
    Device(type="xpu", title="Intel GPU", distributed_type="MULTI_XPU"),
    Mps(
        type="mps",
        title="Apple GPU",
        distributed_type="MULTI_CPU",
        one_process=True,
        index_by_rank=False,
        numbered=False,
        has_streams=False,
        pins_memory=False,
        shares_memory_with_host=True,
        has_float64=False,
        emulates_fp8=True,
    ),
    Device(
        type="neuron",
        title="AWS Neuron core",
        distributed_type="MULTI_NEURON",
        collectives="neuron",
        package="torch_neuronx",
        index_by_rank=False,
    ),
)

_CPU = Cpu(
    type="cpu",
    title="CPU",
    distributed_type="MULTI_CPU",
    index_by_rank=False,
    numbered=False,
    has_streams=False,
    pins_memory=False,
    shares_memory_with_host=True,
    emulates_fp8=True,
)


@functools.cache
def accelerators() -> tuple[Device, ...]:
    """All kinds of accelerators that the package knows, best first: those of installed packages, then the built-in.

    Raises:
        InvalidArgument: a package's entry point cannot be loaded, or is not a device.
    """
    brought = _brought()
    return (*brought, *(row for row in _ROWS if row.type not in {device.type for device in brought}))


def kind_of(device: torch.device | str) -> Device:
    """The kind of ``device``, of :func:`accelerators` or the CPU. Of another type, what ``torch.<type>`` says.

    Args:
        device: a device, its name, or a type.
    """
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    if name == _CPU.type:
        return _CPU
    return next((row for row in accelerators() if row.type == name), None) or Device(type=name, title=name)


def _brought() -> tuple[Device, ...]:
    """The devices of installed packages."""
    return tuple(map(_loaded, metadata.entry_points(group=ENTRY_POINTS)))


def _loaded(entry: metadata.EntryPoint) -> Device:
    by = f"the package {entry.dist.name}" if entry.dist is not None else "an installed package"
    where = f"{by} brings the device {entry.name!r} ({ENTRY_POINTS}: {entry.value})"
    try:
        found = entry.load()
    except Exception as error:
        raise InvalidArgument(
            f"{where}, which cannot be loaded ({type(error).__name__}: {error}); repair or uninstall that package"
        ) from error
    if not isinstance(found, Device) or found.type != entry.name:
        what = f"one of type {found.type!r}" if isinstance(found, Device) else type(found).__name__
        raise InvalidArgument(
            f"{where}: expected an accelerate_cpp.devices.device.Device of that type, found {what}; repair or "
            "uninstall that package"
        )
    return found
