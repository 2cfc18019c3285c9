"""Which libraries are installed here, and which kinds of devices torch can use.

Functions do not import the library that they check, unless their docstring says so. Answers about devices are cached;
those about libraries are not, so that a library which has just been installed is found.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import env_table
from accelerate_cpp.config.libraries import found as _found
from accelerate_cpp.config.libraries import is_installed as _is_installed
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

__getattr__ = lending("utils.imports")

_logger = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# ------------------------------------------------------------------------------------------------------------ libraries


def _library(name: str, module: str, *distributions: str, **versions: str) -> Callable[[], bool]:
    """The function ``name``, which returns :func:`_is_installed`."""

    def probe() -> bool:
        return _is_installed(module, *distributions, **versions)

    bounds = {"at_least": "of at least version {}", "below": "of a version below {}"}
    asked = "".join(f", {bounds[bound].format(version)}" for bound, version in versions.items())
    probe.__name__ = probe.__qualname__ = name
    probe.__doc__ = f"Whether {(distributions or (module,))[0]} is installed{asked}."
    return probe


is_4bit_bnb_available = _library("is_4bit_bnb_available", "bitsandbytes", at_least="0.39.0")
is_8bit_bnb_available = _library("is_8bit_bnb_available", "bitsandbytes", at_least="0.37.2")
is_aim_available = _library("is_aim_available", "aim", below="4.0.0")
is_amdsmi_available = _library("is_amdsmi_available", "amdsmi")
is_boto3_available = _library("is_boto3_available", "boto3")
is_clearml_available = _library("is_clearml_available", "clearml")
is_comet_ml_available = _library("is_comet_ml_available", "comet_ml")
is_datasets_available = _library("is_datasets_available", "datasets")
is_deepspeed_available = _library("is_deepspeed_available", "deepspeed")
is_dvclive_available = _library("is_dvclive_available", "dvclive")
is_import_timer_available = _library("is_import_timer_available", "import_timer")
is_lomo_available = _library("is_lomo_available", "lomo_optim")
is_matplotlib_available = _library("is_matplotlib_available", "matplotlib")
is_mlflow_available = _library("is_mlflow_available", "mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _library("is_msamp_available", "msamp", "ms-amp")
is_pandas_available = _library("is_pandas_available", "pandas")
is_peft_available = _library("is_peft_available", "peft")
is_pynvml_available = _library("is_pynvml_available", "pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = _library("is_pytest_available", "pytest")
is_sagemaker_available = _library("is_sagemaker_available", "sagemaker")
is_schedulefree_available = _library("is_schedulefree_available", "schedulefree")
is_swanlab_available = _library("is_swanlab_available", "swanlab")
is_timm_available = _library("is_timm_available", "timm")
is_torchao_available = _library("is_torchao_available", "torchao", at_least="0.6.1")
is_torchdata_available = _library("is_torchdata_available", "torchdata")
is_torchdata_stateful_dataloader_available = _library(
    "is_torchdata_stateful_dataloader_available", "torchdata", at_least="0.8.0"
)
is_torchvision_available = _library("is_torchvision_available", "torchvision")
is_tqdm_available = _library("is_tqdm_available", "tqdm")
is_trackio_available = _library("is_trackio_available", "trackio")
is_transformer_engine_available = _library(
    "is_transformer_engine_available", "transformer_engine", "transformer-engine"
)
is_transformers_available = _library("is_transformers_available", "transformers")
is_triton_available = _library("is_triton_available", "triton")
is_wandb_available = _library("is_wandb_available", "wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, of at least ``min_version`` if that is given."""
    return _is_installed("bitsandbytes") if min_version is None else _is_installed("bitsandbytes", at_least=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether the installed bitsandbytes reports that it works on several kinds of devices. Imports it."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_rich_available() -> bool:
    """Whether rich is installed and ``ACCELERATE_ENABLE_RICH`` enables its tracebacks.

    Example:
        >>> from accelerate_cpp import is_rich_available
        >>> isinstance(is_rich_available(), bool)
        True
    """
    return env_table.ENABLE_RICH.get() and _is_installed("rich")


def is_megatron_lm_available() -> bool:
    """Whether ``ACCELERATE_USE_MEGATRON_LM`` is set and Megatron-LM with core 0.8 or newer is installed.

    Imports the package ``megatron`` to check whether it has training code.
    """
    if not env_table.USE_MEGATRON_LM.get():
        return False
    return _is_installed("megatron", "megatron-core", at_least="0.8.0") and _found("megatron.training")


def is_pippy_available() -> bool:
    """Whether torch can train in pipelines: since version 2.4."""
    return _is_installed("torch", at_least="2.4.0")


def is_weights_only_available() -> bool:
    """Whether ``torch.load`` supports lists of safe classes: since version 2.4."""
    return _is_installed("torch", at_least="2.4.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether TransformerEngine scales blocks of 32 values on this GPU. Imports it, and queries the driver."""
    if not is_transformer_engine_available():
        return False
    supported, _ = importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()
    return bool(supported)


def is_fp8_available() -> bool:
    """Whether a library that trains in fp8 is installed: MS-AMP, TransformerEngine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def _required(title: str, is_available: Callable[[], bool], install: str) -> Callable[[_Function], _Function]:
    """A decorator: the function refuses to run without a library."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not is_available():
                raise MissingLibrary(
                    f"{function.__qualname__} needs {title}, which is not installed; install it: {install}"
                )
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def deepspeed_required(func: _Function) -> _Function:
    """Decorates a function that needs DeepSpeed: a call without it raises ``MissingLibrary``, an ``ImportError``."""
    return _required("DeepSpeed", is_deepspeed_available, "pip install deepspeed")(func)


def torchao_required(func: _Function) -> _Function:
    """Decorates a function that needs torchao: a call without it raises ``MissingLibrary``, an ``ImportError``."""
    return _required("torchao", is_torchao_available, "pip install torchao")(func)


# -------------------------------------------------------------------------------------------------------------- devices


def _has_device(kind: str, check_device: bool) -> bool:
    from accelerate_cpp.devices.table import kind_of  # loads torch

    device = kind_of(kind)
    return device.count() > 0 if check_device else device.is_available()


def is_cuda_available() -> bool:
    """Whether torch sees a GPU through CUDA or ROCm. If possible, it checks without initialising the driver."""
    import torch

    with env_table.replaced_environment(env_table.render({env_table.NVML_BASED_CUDA_CHECK: True})):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether torch is built for ROCm and sees a GPU."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch sees the GPU of a Mac, and is of at least ``min_version``."""
    return _has_device("mps", check_device=False) and _is_installed("torch", at_least=min_version)


@functools.cache
def is_xpu_available(check_device: bool = False) -> bool:
    """Whether torch sees an Intel GPU; with ``check_device``, one that it can count."""
    return _has_device("xpu", check_device)


@functools.cache
def is_npu_available(check_device: bool = False) -> bool:
    """Whether torch_npu, which is imported, sees an Ascend NPU; with ``check_device``, one that it can count."""
    return _has_device("npu", check_device)


@functools.cache
def is_mlu_available(check_device: bool = False) -> bool:
    """Whether torch_mlu, which is imported, sees a Cambricon MLU; with ``check_device``, one that it can count."""
    return _has_device("mlu", check_device)


@functools.cache
def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether torch_sdaa, which is imported, sees a Tecorigin SDAA; with ``check_device``, one that it can count."""
    return _has_device("sdaa", check_device)


@functools.cache
def is_musa_available(check_device: bool = False) -> bool:
    """Whether torch_musa, which is imported, sees a Moore Threads GPU; with ``check_device``, one it can count."""
    return _has_device("musa", check_device)


@functools.cache
def is_neuron_available(check_device: bool = False) -> bool:
    """Whether torch_neuronx, which is imported, sees a Neuron core; with ``check_device``, one that it can count."""
    return _has_device("neuron", check_device)


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether habana_frameworks, which is imported, sees a Gaudi; with ``init_hccl``, its collectives are loaded."""
    available = _has_device("hpu", check_device=False)
    if available and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return available


def is_habana_gaudi1() -> bool:
    """Whether the Gaudi of this machine is one of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    from accelerate_cpp.devices.table import Hpu, kind_of

    device = kind_of("hpu")
    return isinstance(device, Hpu) and device.is_first_generation()


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and ``USE_TORCH_XLA`` does not switch it off.

    Args:
        check_is_tpu: whether it also runs on a TPU, for which it is imported.
        check_is_gpu: whether it also runs on a GPU, for which it is imported.

    Raises:
        InvalidArgument: both are true.
    """
    if check_is_tpu and check_is_gpu:
        raise InvalidArgument("check_is_tpu and check_is_gpu exclude each other: pass one of them")
    if not env_table.USE_TORCH_XLA.get() or not _is_installed("torch_xla"):
        return False
    wanted = ("TPU",) if check_is_tpu else ("GPU", "CUDA") if check_is_gpu else ()
    return not wanted or importlib.import_module("torch_xla.runtime").device_type() in wanted


def is_xccl_available() -> bool:
    """Whether torch is built with the collectives of Intel GPUs."""
    import torch.distributed as dist

    return dist.is_available() and getattr(dist, "is_xccl_available", bool)()


def available_device_type() -> str:
    """The kind of accelerator of this machine, ``"cpu"`` without one; of several, the first that is found."""
    from accelerate_cpp.devices.table import accelerators  # loads torch

    return next((kind.type for kind in accelerators() if kind.is_available()), "cpu")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the accelerator here, or the CPU without one, computes in bf16; with ``ignore_tpu``, TPUs are ignored."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    import torch

    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    devices = getattr(torch, available_device_type(), None)
    return bool(getattr(devices, "is_bf16_supported", lambda: True)())


def is_fp16_available() -> bool:
    """Whether the accelerator here, or the CPU without one, computes in fp16: all but the first Gaudi do."""
    return not is_habana_gaudi1()
