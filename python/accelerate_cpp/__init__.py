"""A drop-in for Hugging Face Accelerate with a C++ core. Each name is loaded when it is first used."""

from __future__ import annotations

from accelerate_cpp.alias.moved import find_moved
from accelerate_cpp.config import env_table
from accelerate_cpp.lazy import lazy_names

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "utils.dataclasses",
    "DDPCommunicationHookType": "utils.dataclasses",
    "DataLoaderConfiguration": "utils.dataclasses",
    "DeepSpeedPlugin": "utils.dataclasses",
    "DistributedDataParallelKwargs": "utils.dataclasses",
    "DistributedType": "utils.dataclasses",
    "FullyShardedDataParallelPlugin": "utils.dataclasses",
    "GradScalerKwargs": "utils.dataclasses",
    "InitProcessGroupKwargs": "utils.dataclasses",
    "MasterWeights": "precision.master_weights",
    "ParallelismConfig": "parallelism_config",
    "PartialState": "state",
    "ProfileKwargs": "utils.dataclasses",
    "cpu_offload": "big_modeling",
    "cpu_offload_with_hook": "big_modeling",
    "debug_launcher": "launchers",
    "disk_offload": "big_modeling",
    "dispatch_model": "big_modeling",
    "find_executable_batch_size": "utils.memory",
    "infer_auto_device_map": "utils",
    "init_empty_weights": "big_modeling",
    "init_on_device": "big_modeling",
    "is_rich_available": "utils.imports",
    "is_shared": "shared_memory",
    "load_checkpoint_and_dispatch": "big_modeling",
    "load_checkpoint_in_model": "utils",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
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
        "big_modeling",
        "checkpointing",
        "commands",
        "data_loader",
        "errors",
        "hooks",
        "inference",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "parallelism_config",
        "scheduler",
        "shared_memory",
        "state",
        "test_utils",
        "tracking",
        "utils",
    }
)

_MODULE_OF = {name: f"{__name__}.{module}" for name, module in _HOMES.items()}

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = lazy_names(__name__, globals(), _MODULE_OF, _SUBMODULES)

find_moved()
if env_table.ENABLE_RICH.get():
    from accelerate_cpp.utils.imports import is_rich_available

    if is_rich_available():
        from accelerate_cpp.utils import rich as rich  # shows tracebacks from here on
