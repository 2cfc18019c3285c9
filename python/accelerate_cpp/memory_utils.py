"""The old place of :mod:`accelerate_cpp.utils.memory`."""

from __future__ import annotations

import warnings

from accelerate_cpp.utils.memory import find_executable_batch_size, release_memory, should_reduce_batch_size

__all__ = ["find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

warnings.warn(
    "accelerate_cpp.memory_utils has moved: import find_executable_batch_size from accelerate_cpp",
    FutureWarning,
    stacklevel=2,
)
