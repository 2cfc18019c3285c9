"""The accelerator that tests run on."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from accelerate_cpp.utils.imports import available_device_type

__all__ = ["device_count", "get_backend", "memory_allocated_func", "torch_device"]


def _no_memory() -> int:
    """The bytes allocated on a kind of device that does not count them."""
    return 0


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """The kind of accelerator here, how many there are, and what tells how many bytes are allocated on it.

    Without an accelerator these are ``"cpu"``, 1, and a function that returns 0.
    """
    kind = available_device_type()
    if kind == "cpu":
        return kind, 1, _no_memory
    if kind == "xla":
        return kind, importlib.import_module("torch_xla.runtime").global_runtime_device_count(), _no_memory
    devices = getattr(torch, kind)
    allocated = "current_allocated_memory" if kind == "mps" else "memory_allocated"
    return kind, devices.device_count(), getattr(devices, allocated, _no_memory)


torch_device, device_count, memory_allocated_func = get_backend()
