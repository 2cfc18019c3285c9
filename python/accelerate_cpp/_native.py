"""The one door to the C++ module: checks that it fits the torch that is installed, then loads it.

Import names from here, never from ``_C``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate_cpp.installation import require_fitting_torch

require_fitting_torch()
import torch  # noqa: E402, F401  (the C++ module needs its libraries)

from accelerate_cpp._C import (  # noqa: E402  (only a module that fits torch may be loaded)
    AheadCopies,
    C10dBackend,
    Communicator,
    GradientReducer,
    LossScale,
    NcclComm,
    ReadAhead,
    ScatteredReducer,
    any_fit,
    balanced_partition,
    choose_device,
    compile_gradient_kernels,
    copy_tensors,
    crc32,
    create_backend,
    create_hierarchical_backend,
    create_segment,
    cuda_capabilities,
    fail_at_exit,
    forget_xla_group,
    have_gradients,
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
    register_xla_group,
    scale_gradients,
    shared_empty,
    time_waited,
    xla_handlers,
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
    "ScatteredReducer",
    "any_fit",
    "balanced_partition",
    "choose_device",
    "compile_gradient_kernels",
    "copy_tensors",
    "crc32",
    "create_backend",
    "create_hierarchical_backend",
    "create_segment",
    "cuda_capabilities",
    "fail_at_exit",
    "forget_xla_group",
    "have_gradients",
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
    "register_xla_group",
    "scale_gradients",
    "shared_empty",
    "time_waited",
    "xla_handlers",
]
