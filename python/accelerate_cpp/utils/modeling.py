"""Large models: sizes, device maps, tensors on devices, checkpoints. Other packages import these names from here."""

from __future__ import annotations

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.checkpoint.files import parse_size
from accelerate_cpp.placement.checkpoint_loading import load_checkpoint_in_model, load_state_dict
from accelerate_cpp.placement.device_map import (
    check_device_map,
    clean_device_map,
    get_module_size_with_ties,
    infer_auto_device_map,
)
from accelerate_cpp.placement.device_memory import get_balanced_memory, get_max_memory
from accelerate_cpp.placement.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)
from accelerate_cpp.placement.module_tensors import (
    as_dtype as _get_proper_dtype,  # noqa: F401 - the original's name
)
from accelerate_cpp.placement.module_tensors import (
    dtype_byte_size,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accelerate_cpp.placement.offload import load_offloaded_weight, offload_weight, save_offload_index
from accelerate_cpp.placement.offloaded_modules import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_weights,
)
from accelerate_cpp.placement.tied_parameters import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    ensure_weights_retied,
    find_tied_parameters,
    retie_parameters,
)
from accelerate_cpp.plugins.enums import CustomDtype

__all__ = [
    "CustomDtype",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "ensure_weights_retied",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_weight",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]

__getattr__ = lending("utils.modeling")


def convert_file_size_to_int(size: int | str) -> int:
    """The number of bytes that ``size`` means: ``5_000``, ``"10GB"`` (powers of 1000) or ``"5GiB"`` (of 1024).

    A lower-case ``b`` in KB, MB, GB or TB means bits: ``"8Mb"`` are 1,000,000 bytes.

    Raises:
        ValueError: ``size`` cannot be understood, or is negative.
    """
    return parse_size(size, argument="size", small_b_is_bits=True)
