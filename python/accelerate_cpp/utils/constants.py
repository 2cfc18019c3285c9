"""Names of files, accepted names of options, and the first versions of libraries that have certain features."""

from __future__ import annotations

import torch

from accelerate_cpp.checkpoint.names import MODEL_NAME as MODEL_NAME
from accelerate_cpp.checkpoint.names import OPTIMIZER_NAME as OPTIMIZER_NAME
from accelerate_cpp.checkpoint.names import RNG_STATE_NAME as RNG_STATE_NAME
from accelerate_cpp.checkpoint.names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accelerate_cpp.checkpoint.names import SAMPLER_NAME as SAMPLER_NAME
from accelerate_cpp.checkpoint.names import SCALER_NAME as SCALER_NAME
from accelerate_cpp.checkpoint.names import SCHEDULER_NAME as SCHEDULER_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_NAME as WEIGHTS_NAME
from accelerate_cpp.checkpoint.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accelerate_cpp.config.libraries import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate_cpp.plugins.fsdp_options import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accelerate_cpp.plugins.handlers import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accelerate_cpp.plugins.parallelism import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)

FSDP_MODEL_NAME = "pytorch_model_fsdp"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]

# Accepted options of sharded training.
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]

# Other launchers, and how torch.compile may tune.
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

# The first versions with sharding of both generations, meshes, prefixes of lines of an elastic agent, and profiles of
# Meta's and Intel's accelerators.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
FSDP2_PYTORCH_VERSION = "2.6.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"

# Options of torchrun, by their names in its namespace.
TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path"),
    *("log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]

# The values of ``DistributedType`` that mean GPUs of NVIDIA, and those whose processes communicate through
# ``torch.distributed``.
CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA"),
    *("MULTI_MUSA", "MULTI_XPU", "MULTI_CPU", "MULTI_HPU", "MULTI_NEURON"),
]

# Layers whose parameters may be kept in fp32 while they compute in lower precision.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
    torch.nn.Linear,
)
