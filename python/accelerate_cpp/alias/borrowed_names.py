"""Names that modules of the original have only because they import them, and that programs import from these modules.

``from accelerate.accelerator import is_xpu_available`` works, and so does putting another function in its place,
as tests do: what is listed here is looked up where this package has it, at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# By module, and there by the module that has them: names with blanks between.
NAMES: dict[str, dict[str, str]] = {
    "accelerator": {
        "checkpointing": "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
        "data_loader": "DataLoaderDispatcher",
        "logging": "get_logger",
        "state": "PartialState",
        "tracking": "LOGGER_TYPE_TO_CLASS",
        "utils": (
            "FullyShardedDataParallelPlugin MODEL_NAME MegatronLMPlugin SAFE_WEIGHTS_INDEX_NAME "
            "SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME TorchTensorParallelPlugin WEIGHTS_INDEX_NAME "
            "WEIGHTS_NAME WEIGHTS_PATTERN_NAME apply_fp8_autowrap check_os_kernel "
            "clean_state_dict_for_safetensors compare_versions compile_regions compile_regions_deepspeed "
            "compile_regions_fsdp2 convert_model convert_model_to_fp8_ao convert_outputs_to_fp32 "
            "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model "
            "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_grad_scaler "
            "get_mixed_precision_context_manager get_model_tp_size get_pretty_name has_offloaded_params "
            "is_bf16_available is_compiled_module is_deepspeed_available "
            "is_lomo_available is_megatron_lm_available is_mlu_available is_msamp_available is_musa_available "
            "is_npu_available is_torch_version is_torch_xla_available is_torchao_available "
            "is_transformer_engine_available load_fsdp_model load_fsdp_optimizer "
            "model_has_dtensor parse_choice_from_env release_memory save_fsdp_model save_fsdp_optimizer "
            "wait_for_everyone"
        ),
        "utils.constants": "DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION",
        "utils.modeling": "get_state_dict_offloaded_model",
        "plugins.split_sequences": "_attach_context_parallel_hooks _refuse_recurrent_layers_under_sequence_parallelism",
    },
    "big_modeling": {
        "hooks": "attach_align_device_hook_on_blocks",
        "utils": (
            "check_cuda_p2p_ib_support extract_submodules_state_dict find_tied_parameters get_balanced_memory "
            "infer_auto_device_map is_bnb_available is_mlu_available is_musa_available is_neuron_available "
            "is_npu_available is_sdaa_available is_xpu_available offload_state_dict parse_flag_from_env "
            "recursive_getattr retie_parameters"
        ),
        "utils.constants": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "plugins.split_sequences": "_attach_context_parallel_hooks _refuse_recurrent_layers_under_sequence_parallelism",
    },
    "checkpointing": {
        "logging": "get_logger",
        "utils": (
            "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME SCALER_NAME "
            "SCHEDULER_NAME WEIGHTS_NAME get_pretty_name is_cuda_available is_hpu_available is_mlu_available "
            "is_musa_available is_neuron_available is_sdaa_available is_torch_version is_torch_xla_available "
            "is_xpu_available load save"
        ),
    },
    "commands.env": {
        "commands.config_args": "default_config_file load_config_from_file",
        "utils": (
            "is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available "
            "is_sdaa_available is_xpu_available"
        ),
    },
    "commands.estimate": {
        "big_modeling": "init_empty_weights",
        "utils": "calculate_maximum_sizes convert_bytes is_timm_available is_transformers_available",
    },
    "commands.launch": {
        "commands.config_args": "SageMakerConfig default_config_file load_config_from_file",
        "utils": (
            "ComputeEnvironment DistributedType PrepareForLaunch check_cuda_p2p_ib_support "
            "convert_dict_to_env_variables get_int_from_env is_bf16_available is_deepspeed_available "
            "is_hpu_available is_mlu_available is_musa_available is_neuron_available is_npu_available "
            "is_rich_available is_sagemaker_available is_sdaa_available is_torch_xla_available is_xpu_available "
            "patch_environment prepare_multi_gpu_env prepare_simple_launcher_cmd_env str_to_bool"
        ),
        "utils.constants": "DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES",
    },
    "commands.merge": {
        "utils": "merge_fsdp_weights",
    },
    "data_loader": {
        "logging": "get_logger",
        "state": "GradientState",
        "utils": (
            "DistributedType RNGType broadcast compare_versions concatenate find_batch_size get_data_structure "
            "initialize_tensors is_datasets_available is_torch_version is_torch_xla_available "
            "is_torchdata_stateful_dataloader_available send_to_device"
        ),
    },
    "hooks": {
        "state": "PartialState",
        "utils": (
            "find_device is_mlu_available is_musa_available is_npu_available named_module_tensors "
            "recursive_getattr set_module_tensor_to_device"
        ),
        "utils.modeling": "get_non_persistent_buffers",
    },
    "inference": {
        "utils": (
            "calculate_maximum_sizes convert_bytes copy_tensor_to_devices ignorant_find_batch_size "
            "infer_auto_device_map is_pippy_available pad_input_tensors"
        ),
    },
    "launchers": {
        "state": "AcceleratorState PartialState",
        "utils": (
            "PrecisionType PrepareForLaunch are_libraries_initialized check_cuda_p2p_ib_support "
            "get_current_device_type get_gpu_info is_mps_available is_rocm_available is_torch_version "
            "patch_environment"
        ),
        "utils.constants": "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    },
    "optimizer": {
        "utils": "DistributedType honor_type is_lomo_available is_torch_xla_available",
    },
    "parallelism_config": {
        "utils": "DistributedType is_torch_version",
    },
    "scheduler": {
        "state": "AcceleratorState",
    },
    "state": {
        "utils": (
            "DynamoBackend GradientAccumulationPlugin SageMakerDistributedType check_cuda_fp8_capability "
            "check_cuda_p2p_ib_support deepspeed_required get_cpu_distributed_information get_int_from_env "
            "is_datasets_available is_deepspeed_available is_fp8_available is_habana_gaudi1 is_hpu_available "
            "is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available "
            "is_sdaa_available is_torch_xla_available is_xccl_available is_xpu_available parse_choice_from_env "
            "parse_flag_from_env set_numa_affinity"
        ),
    },
    "test_utils.testing": {
        "state": "AcceleratorState GradientState",
        "utils": (
            "check_cuda_fp8_capability compare_versions is_aim_available is_bnb_available is_clearml_available "
            "is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available "
            "is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 is_import_timer_available "
            "is_matplotlib_available is_mlflow_available is_mlu_available is_mps_available is_musa_available "
            "is_neuron_available is_npu_available is_pandas_available is_peft_available is_pippy_available "
            "is_pytest_available is_schedulefree_available is_sdaa_available is_swanlab_available "
            "is_tensorboard_available is_timm_available is_torch_version is_torch_xla_available "
            "is_torchao_available is_torchdata_stateful_dataloader_available is_torchvision_available "
            "is_trackio_available is_transformer_engine_available is_transformer_engine_mxfp8_available "
            "is_transformers_available is_triton_available is_wandb_available parse_flag_from_env str_to_bool"
        ),
    },
    "test_utils.training": {
        "utils": "DistributedType",
    },
    "tracking": {
        "logging": "get_logger",
        "state": "PartialState",
        "utils": (
            "compare_versions is_aim_available is_clearml_available is_comet_ml_available is_dvclive_available "
            "is_mlflow_available is_swanlab_available is_tensorboard_available is_trackio_available "
            "is_wandb_available listify str_to_bool"
        ),
    },
    "utils.ao": {
        "checkpointing": "TYPE_CHECKING",
        "utils": "is_torchao_available torchao_required",
    },
    "utils.bnb": {
        "big_modeling": "init_empty_weights",
        "utils": (
            "get_balanced_memory infer_auto_device_map load_checkpoint_in_model offload_weight "
            "set_module_tensor_to_device"
        ),
    },
    "utils.dataclasses": {
        "checkpointing": "TYPE_CHECKING",
        "utils": (
            "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TensorInformation XPU_PROFILING_AVAILABLE_PYTORCH_VERSION "
            "compare_versions is_cuda_available is_hpu_available is_mlu_available is_msamp_available "
            "is_musa_available is_neuron_available is_npu_available is_rocm_available is_torch_version "
            "is_torchao_available is_transformer_engine_available is_xpu_available parse_flag_from_env "
            "str_to_bool"
        ),
        "utils.constants": (
            "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
            "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION FSDP2_PYTORCH_VERSION FSDP_AUTO_WRAP_POLICY "
            "FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY"
        ),
    },
    "utils.deepspeed": {
        "utils": "DistributedType compare_versions is_bnb_available",
    },
    "utils.fsdp_utils": {
        "logging": "get_logger",
        "utils": "get_module_children_bottom_up is_compiled_module is_torch_version save",
        "utils.constants": "FSDP_MODEL_NAME",
        "utils.dataclasses": "get_module_class_from_name",
        "utils.modeling": "get_non_persistent_buffers",
    },
    "utils.imports": {
        "utils": "compare_versions is_torch_version parse_flag_from_env patch_environment str_to_bool",
    },
    "utils.launch": {
        "commands.config_args": "SageMakerConfig",
        "utils": (
            "DynamoBackend PrecisionType SageMakerDistributedType compare_versions is_fp8_available "
            "is_hpu_available is_mlu_available is_musa_available is_neuron_available is_npu_available "
            "is_port_in_use is_sdaa_available is_torch_xla_available is_xpu_available merge_dicts str_to_bool"
        ),
        "utils.constants": "DEEPSPEED_MULTINODE_LAUNCHERS",
    },
    "utils.megatron_lm": {
        "data_loader": "prepare_data_loader",
        "utils": "is_megatron_lm_available send_to_device",
    },
    "utils.memory": {
        "utils": (
            "is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available "
            "is_neuron_available is_npu_available is_sdaa_available is_xpu_available"
        ),
    },
    "utils.modeling": {
        "state": "AcceleratorState",
        "utils": (
            "AutocastKwargs DistributedType SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME clear_device_cache "
            "get_grad_scaler get_mixed_precision_context_manager is_hpu_available is_mlu_available "
            "is_mps_available is_musa_available is_npu_available is_peft_available is_peft_model "
            "is_sdaa_available is_torch_version is_torch_xla_available is_tqdm_available is_xpu_available tqdm"
        ),
    },
    "utils.operations": {
        "state": "AcceleratorState PartialState",
        "utils": (
            "DistributedType TORCH_DISTRIBUTED_OPERATION_TYPES is_npu_available is_torch_version is_torch_xla_available"
        ),
    },
    "utils.other": {
        "logging": "get_logger",
        "state": "PartialState",
        "utils": (
            "DistributedType compile_regions_deepspeed compile_regions_fsdp2 convert_model id_tensor_storage "
            "is_deepspeed_available is_torch_version is_torch_xla_available is_weights_only_available reduce "
            "write_basic_config"
        ),
        "utils.constants": "FSDP_PYTORCH_VERSION",
    },
    "utils.random": {
        "state": "AcceleratorState",
        "utils": (
            "DistributedType RNGType is_hpu_available is_mlu_available is_musa_available is_neuron_available "
            "is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available"
        ),
        "utils.constants": "CUDA_DISTRIBUTED_TYPES",
    },
    "utils.tqdm": {
        "state": "PartialState",
        "utils": "is_tqdm_available",
    },
    "utils.transformer_engine": {
        "utils": "GatheredParameters is_hpu_available is_transformer_engine_available",
    },
}


_PACKAGE = __name__.partition(".")[0]


def lending(module: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` for ``module`` (its name inside the package), which finds the names listed."""
    home_of = {name: home for home, names in NAMES[module].items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module '{_PACKAGE}.{module}' has no attribute {name!r}")
        return getattr(importlib.import_module(f"{_PACKAGE}.{home_of[name]}"), name)

    return load
