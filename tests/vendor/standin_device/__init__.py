"""A device as a vendor brings it: a package beside torch, which torch loads by an entry point when it is imported.

The device is the double of the core's tests (``tests/cpp/torch_bridge/device_double.h``): two devices with memory of
the host. ``tests/python/devices/vendor.py`` installs the package, with the entry points of its distribution.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = Path(os.environ["STANDIN_DEVICE_LIBRARIES"])


class _Module(ModuleType):
    """``torch.standin``. The device computes with torch's generator for the CPU, so that is its generator, too."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return int(torch.ops.device_double.current_device())

    def set_device(self, device: Any) -> None:
        torch.ops.device_double.set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def memory_allocated(self, device: int | None = None) -> int:
        return int(torch.ops.device_double.bytes_in_use())

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return 2**30 - self.memory_allocated(), 2**30

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: int | None = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: int | None = None) -> None:
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()] * 2

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])


def load() -> None:
    """Makes the device known to torch: its operations, its module and its collectives."""
    torch.ops.load_library(str(FOLDER / "libdevice_double.so"))
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", _Module("torch.standin"))
    torch.utils.generate_methods_for_privateuse1_backend(for_module=True, for_tensor=True, for_storage=True)
    torch.distributed.Backend.register_backend("standin_collectives", _collectives, devices=["standin"])


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    (file,) = FOLDER.glob("device_double_collectives*.so")
    spec = importlib.util.spec_from_file_location("device_double_collectives", file)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library.over(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))


def __getattr__(name: str) -> Any:
    """``DEVICE``, for accelerate_cpp: torch loads this module before that package can be."""
    if name != "DEVICE":
        raise AttributeError(name)
    from accelerate_cpp.devices.device import Device

    return Device(
        type="standin", title="Stand-in", collectives="standin_collectives", has_streams=False, pins_memory=False
    )
