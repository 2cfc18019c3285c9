"""Memory of accelerators: giving back what torch keeps, and telling when it is exhausted."""

from __future__ import annotations

import gc

import torch

from accelerate_cpp.devices.selection import available_accelerators

# What allocators say when memory is exhausted, and cuDNN when it finds no algorithm that fits.
_OUT_OF_MEMORY_TEXTS = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Returns memory that torch keeps for later to the accelerator; first collects garbage if asked to."""
    if garbage_collection:
        gc.collect()
    for device_type, _ in available_accelerators()[:1]:
        torch.get_device_module(device_type).empty_cache()


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether ``exception`` says that memory is exhausted, on the CPU or on an accelerator."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(text in str(exception.args[0]) for text in _OUT_OF_MEMORY_TEXTS)


def release_cache(device: torch.device) -> None:
    """Collects garbage, and returns memory that torch keeps for later to ``device``."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
