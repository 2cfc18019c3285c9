"""Decorators that skip a test, or a class of tests, where something is missing that it needs.

They are asked when the test is defined. They go with unittest and with pytest.
"""

from __future__ import annotations

import functools
import sys
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_cpp.config import env_table
from accelerate_cpp.test_utils import backend
from accelerate_cpp.utils import constants, imports
from accelerate_cpp.utils.environment import check_cuda_fp8_capability
from accelerate_cpp.utils.versions import compare_versions, is_torch_version

_Test = TypeVar("_Test", bound=Callable[..., Any])
_Decorator = Callable[[_Test], _Test]


def _requires(what: str, is_there: Callable[[], bool]) -> Any:
    """A decorator that skips a test unless ``is_there()``, with the reason that it needs ``what``."""

    def require(test_case: _Test) -> _Test:
        return unittest.skipUnless(is_there(), f"test requires {what}")(test_case)

    require.__doc__ = f"Skips the test here unless it finds {what}."
    return require


def _devices(*kinds: str, at_least: int = 1, at_most: int | None = None) -> Callable[[], bool]:
    """Whether tests run on one of ``kinds`` (any accelerator if there are none), on so many devices."""

    def is_there() -> bool:
        fits = backend.torch_device in kinds if kinds else backend.torch_device != "cpu"
        return fits and backend.device_count >= at_least and (at_most is None or backend.device_count <= at_most)

    return is_there


def _not_on(kind: str) -> Callable[[], bool]:
    return lambda: backend.torch_device != kind


def _has_fp8() -> bool:
    return imports.is_fp8_available() and (backend.torch_device != "cuda" or check_cuda_fp8_capability())


def _has_tensor_parallelism() -> bool:
    return (
        is_torch_version(">=", constants.BETA_TP_AVAILABLE_PYTORCH_VERSION)
        and imports.is_transformers_available()
        and compare_versions("transformers", ">=", constants.BETA_TP_AVAILABLE_TRANSFORMERS_VERSION)
    )


_TRACKERS = {
    "aim": imports.is_aim_available,
    "clearml": imports.is_clearml_available,
    "comet_ml": imports.is_comet_ml_available,
    "dvclive": imports.is_dvclive_available,
    "mlflow": imports.is_mlflow_available,
    "swanlab": imports.is_swanlab_available,
    "tensorboard": imports.is_tensorboard_available,
    "trackio": imports.is_trackio_available,
    "wandb": imports.is_wandb_available,
}

require_cpu = _requires("a machine without accelerator", lambda: backend.torch_device == "cpu")
require_non_cpu = _requires("an accelerator", _devices())
require_single_device = _requires("exactly one accelerator", _devices(at_most=1))
require_multi_device = _requires("several accelerators", _devices(at_least=2))
require_cuda = _requires("a GPU", _devices("cuda"))
require_single_gpu = _requires("exactly one GPU", _devices("cuda", at_most=1))
require_multi_gpu = _requires("several GPUs", _devices("cuda", at_least=2))
require_xpu = _requires("an XPU", _devices("xpu"))
require_non_xpu = _requires("something else than an XPU", _not_on("xpu"))
require_single_xpu = _requires("exactly one XPU", _devices("xpu", at_most=1))
require_multi_xpu = _requires("several XPUs", _devices("xpu", at_least=2))
require_cuda_or_xpu = _requires("a GPU or an XPU", _devices("cuda", "xpu"))
require_multi_gpu_or_xpu = _requires("several GPUs or XPUs", _devices("cuda", "xpu", at_least=2))
require_cuda_or_hpu = _requires("a GPU or an HPU", _devices("cuda", "hpu"))
require_non_hpu = _requires("something else than an HPU", _not_on("hpu"))
require_npu = _requires("an NPU", _devices("npu"))
require_mlu = _requires("an MLU", _devices("mlu"))
require_sdaa = _requires("an SDAA", _devices("sdaa"))
require_musa = _requires("a MUSA", _devices("musa"))
require_neuron = _requires("Neuron cores", _devices("neuron"))
require_mps = _requires("the GPU of a Mac", _devices("mps"))
require_tpu = _requires("a TPU", lambda: imports.is_torch_xla_available(check_is_tpu=True))
require_non_torch_xla = _requires("a Python without torch_xla", lambda: not imports.is_torch_xla_available())
require_fp16 = _requires("a device with fp16", imports.is_fp16_available)
require_fp8 = _requires("a library for fp8, and a GPU with fp8 if there is one", _has_fp8)

require_aim = _requires("aim", imports.is_aim_available)
require_bnb = _requires("bitsandbytes", imports.is_bnb_available)
require_clearml = _requires("clearml", imports.is_clearml_available)
require_comet_ml = _requires("comet_ml", imports.is_comet_ml_available)
require_datasets = _requires("datasets", imports.is_datasets_available)
require_deepspeed = _requires("DeepSpeed", imports.is_deepspeed_available)
require_dvclive = _requires("dvclive", imports.is_dvclive_available)
require_huggingface_suite = _requires(
    "transformers and datasets", lambda: imports.is_transformers_available() and imports.is_datasets_available()
)
require_import_timer = _requires("import_timer", imports.is_import_timer_available)
require_matplotlib = _requires("matplotlib", imports.is_matplotlib_available)
require_mlflow = _requires("mlflow", imports.is_mlflow_available)
require_pandas = _requires("pandas", imports.is_pandas_available)
require_peft = _requires("peft", imports.is_peft_available)
require_pippy = _requires("a torch with pipelines", imports.is_pippy_available)
require_schedulefree = _requires("schedulefree", imports.is_schedulefree_available)
require_swanlab = _requires("swanlab", imports.is_swanlab_available)
require_tensorboard = _requires("tensorboard or tensorboardX", imports.is_tensorboard_available)
require_timm = _requires("timm", imports.is_timm_available)
require_torchao = _requires("torchao", imports.is_torchao_available)
require_torchdata_stateful_dataloader = _requires(
    "torchdata with StatefulDataLoader", imports.is_torchdata_stateful_dataloader_available
)
require_torchvision = _requires("torchvision", imports.is_torchvision_available)
require_trackers = _requires(
    f"one of {', '.join(_TRACKERS)}", lambda: any(is_available() for is_available in _TRACKERS.values())
)
require_trackio = _requires("trackio", imports.is_trackio_available)
require_transformer_engine = _requires("TransformerEngine", imports.is_transformer_engine_available)
require_transformer_engine_mxfp8 = _requires(
    "TransformerEngine and a GPU with scales of blocks", imports.is_transformer_engine_mxfp8_available
)
require_transformers = _requires("transformers", imports.is_transformers_available)
require_triton = _requires("triton", imports.is_triton_available)
require_wandb = _requires("wandb", imports.is_wandb_available)
require_fsdp2 = _requires(
    f"torch {constants.FSDP2_PYTORCH_VERSION} or newer, for FSDP 2",
    lambda: is_torch_version(">=", constants.FSDP2_PYTORCH_VERSION),
)
require_tp = _requires("torch and transformers new enough for tensor parallelism", _has_tensor_parallelism)

for _name, _value in list(globals().items()):
    if _name.startswith("require_"):
        _value.__name__ = _value.__qualname__ = _name


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skips a test unless torch is of at least ``version``: ``@require_torch_min_version(version="2.6")``.

    Args:
        test_case: the test; ``None`` gives a decorator.
        version: has to be given.
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    if version is None:
        raise TypeError('require_torch_min_version: pass version="2.6" or the like')
    reason = f"test requires torch version >= {version}"
    return unittest.skipUnless(is_torch_version(">=", version), reason)(test_case)


def slow(test_case: _Test) -> _Test:
    """Skips the test unless the environment has ``RUN_SLOW=1``."""
    return unittest.skipUnless(env_table.RUN_SLOW.get(), "test is slow; set RUN_SLOW=1 to run it")(test_case)


def skip(test_case: _Test) -> _Test:
    """Skips the test."""
    return unittest.skip("Test was skipped")(test_case)


def run_first(test_case: _Test) -> _Test:
    """Marks the test for pytest-order, which runs it before others; without pytest it is left as it is."""
    pytest = sys.modules.get("pytest")
    return test_case if pytest is None else pytest.mark.order(1)(test_case)


__all__ = [name for name in globals() if name.startswith("require_")] + ["run_first", "skip", "slow"]
