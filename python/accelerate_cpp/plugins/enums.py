"""The closed sets of names that arguments, configuration files and environment variables use."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
    "type_of_several_processes",
]


class _ContainsValues(EnumMeta):
    """``value in Type`` is true for a member and for its string value."""

    def __contains__(cls, item: object) -> bool:
        return any(item is member or item == member.value for member in cls)  # type: ignore[var-annotated]


class _NamedValue(Enum, metaclass=_ContainsValues):
    """Members print as their value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """The values of all members, in order."""
        return [str(member) for member in cls]


class DistributedType(str, Enum):
    """The kind of distributed run: a label derived from the number of processes and their device."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


def type_of_several_processes(device: torch.device | str) -> DistributedType:
    """The kind of a run with several processes on devices of this type."""
    from accelerate_cpp.devices.table import kind_of  # loads torch, which the command line does without

    return DistributedType(kind_of(device).distributed_type)


class ComputeEnvironment(str, Enum):
    """Where a run takes place."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum):
    """How a run on SageMaker is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class PrecisionType(str, _NamedValue):
    """The arithmetic of forward and backward passes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(str, Enum):
    """Libraries that train in fp8: TransformerEngine, MS-AMP, torchao."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CustomDtype(Enum):
    """Dtypes of weights that torch does not have; sizes of models are computed for them."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class LoggerType(_NamedValue):
    """Experiment trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(_NamedValue):
    """Random number generators that can be synchronised over the processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DynamoBackend(str, _NamedValue):
    """Backends of ``torch.compile``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(_NamedValue):
    """Ways to compress the gradients that processes exchange."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
