"""A drop-in for Hugging Face Accelerate with a C++ core. Each name is loaded when it is first used."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

__version__ = "0.1.0"

_MODULE_OF: dict[str, str] = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "utils.dataclasses",
    "DDPCommunicationHookType": "utils.dataclasses",
    "DataLoaderConfiguration": "utils.dataclasses",
    "DistributedDataParallelKwargs": "utils.dataclasses",
    "DistributedType": "utils.dataclasses",
    "GradScalerKwargs": "utils.dataclasses",
    "InitProcessGroupKwargs": "utils.dataclasses",
    "MasterWeights": "precision.master_weights",
    "PartialState": "state",
    "ProfileKwargs": "utils.dataclasses",
    "debug_launcher": "launchers",
    "find_executable_batch_size": "utils.memory",
    "is_shared": "shared_memory",
    "notebook_launcher": "launchers",
    "shared_empty": "shared_memory",
    "shared_empty_like": "shared_memory",
    "shared_full": "shared_memory",
    "shared_tensor": "shared_memory",
    "shared_zeros": "shared_memory",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "utils",
}
_SUBMODULES = frozenset(
    {
        "accelerator",
        "checkpointing",
        "commands",
        "data_loader",
        "errors",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "scheduler",
        "shared_memory",
        "state",
        "utils",
    }
)

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = lazy_names(__name__, globals(), _MODULE_OF, _SUBMODULES)
