"""Giving back what torch keeps of an accelerator's memory, and telling when memory is exhausted."""

from __future__ import annotations

import gc

import torch

from accelerate_cpp.devices.host_memory import return_free_memory
from accelerate_cpp.devices.selection import available_devices
from accelerate_cpp.devices.table import kind_of

# What allocators say when memory is exhausted, and cuDNN when it finds no algorithm that fits.
_OUT_OF_MEMORY_TEXTS = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Returns memory that torch keeps for later to the accelerator; first collects garbage, of the host too, if asked
    to.
    """
    if garbage_collection:
        gc.collect()
        return_free_memory()
    for kind in available_devices()[:1]:
        kind.empty_cache()


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
    return_free_memory()
    kind_of(device).empty_cache()
