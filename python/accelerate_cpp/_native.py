"""The one door to the C++ module: checks that it fits the torch that is installed, then loads it.

Import names from here, never from ``_C``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

try:
    from accelerate_cpp._build_info import TORCH_VERSION
except ImportError:
    raise ImportError(
        "accelerate_cpp was not built: its C++ module is missing. Install it with `pip install accelerate-cpp`, or "
        "with `pip install -e .` in a clone"
    ) from None


def check_torch_version(built: str, installed: str) -> None:
    """Raises ``ImportError`` unless both versions have the same major and minor number.

    Args:
        built: the torch that the C++ module was compiled against, for example ``"2.13.0"``.
        installed: the torch that is imported, for example ``"2.13.0+cpu"``.
    """
    if built.split(".")[:2] != installed.split(".")[:2]:
        raise ImportError(
            f"accelerate_cpp was built for torch {built}, but torch {installed} is installed. torch's C++ interface "
            f"changes with every minor version: install torch {'.'.join(built.split('.')[:2])}, or reinstall "
            "accelerate-cpp against the torch you have"
        )


check_torch_version(TORCH_VERSION, torch.__version__)
from accelerate_cpp._C import (  # noqa: E402  (only a module that fits torch may be loaded)
    AheadCopies,
    C10dBackend,
    Communicator,
    GradientReducer,
    LossScale,
    NcclComm,
    ReadAhead,
    any_fit,
    balanced_partition,
    choose_device,
    compile_gradient_kernels,
    copy_tensors,
    create_backend,
    create_hierarchical_backend,
    create_segment,
    cuda_capabilities,
    hold_object_of_pass,
    is_shared_tensor,
    known_device_statistics,
    known_statistics,
    leave_groups,
    measure_gradients,
    memory_left,
    move_tree,
    note_registration,
    open_nccl,
    permuted_indices,
    reduce_instruction_set,
    scale_gradients,
    shared_empty,
    time_waited,
)

if TYPE_CHECKING:
    from accelerate_cpp._C import Segment as Segment  # on Linux only

__all__ = [
    "AheadCopies",
    "C10dBackend",
    "Communicator",
    "GradientReducer",
    "LossScale",
    "NcclComm",
    "ReadAhead",
    "any_fit",
    "balanced_partition",
    "check_torch_version",
    "choose_device",
    "compile_gradient_kernels",
    "copy_tensors",
    "create_backend",
    "create_hierarchical_backend",
    "create_segment",
    "cuda_capabilities",
    "hold_object_of_pass",
    "is_shared_tensor",
    "known_device_statistics",
    "known_statistics",
    "leave_groups",
    "measure_gradients",
    "memory_left",
    "move_tree",
    "note_registration",
    "open_nccl",
    "permuted_indices",
    "reduce_instruction_set",
    "scale_gradients",
    "shared_empty",
    "time_waited",
]
