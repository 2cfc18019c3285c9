"""Everything users import from ``accelerate_cpp.utils``; each name is loaded when it is first used."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

_NAMES: dict[str, tuple[str, ...]] = {
    "dataclasses": (
        "AORecipeKwargs",
        "AutocastKwargs",
        "ComputeEnvironment",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "DynamoBackend",
        "FP8RecipeKwargs",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "LoggerType",
        "MSAMPRecipeKwargs",
        "PrecisionType",
        "ProfileKwargs",
        "ProjectConfiguration",
        "RNGType",
        "SageMakerDistributedType",
        "TERecipeKwargs",
    ),
    "environment": (
        "clear_environment",
        "get_int_from_env",
        "override_numa_affinity",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "set_numa_affinity",
        "str_to_bool",
    ),
    "memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "operations": (
        "CannotPadNestedTensorWarning",
        "TensorInformation",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "copy_tensor_to_devices",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "get_data_structure",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "pad_across_processes",
        "recursively_apply",
        "reduce",
        "send_to_device",
        "slice_tensors",
    ),
    "other": ("extract_model_from_parallel", "is_compiled_module", "load", "save", "wait_for_everyone"),
    "random": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
}
_MODULE_OF: dict[str, str] = {name: module for module, names in _NAMES.items() for name in names}
_SUBMODULES = frozenset({*_NAMES, "enums", "handlers", "recipes"})

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = lazy_names(__name__, globals(), _MODULE_OF, _SUBMODULES)
