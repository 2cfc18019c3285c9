"""What tests of programs use, and scripts to try out an installation; each name is loaded when it is first used."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

_NAMES: dict[str, tuple[str, ...]] = {
    "test_utils.backend": ("device_count", "get_backend", "memory_allocated_func", "torch_device"),
    "test_utils.cases": ("AccelerateTestCase", "MockingTestCase", "TempDirTestCase"),
    "test_utils.processes": (
        "DEFAULT_LAUNCH_COMMAND",
        "execute_subprocess_async",
        "get_launch_command",
        "get_torch_dist_unique_port",
        "path_in_accelerate_package",
        "pytest_xdist_worker_id",
        "run_command",
    ),
    "test_utils.requirements": (
        "require_bnb",
        "require_cpu",
        "require_cuda",
        "require_cuda_or_hpu",
        "require_cuda_or_xpu",
        "require_fp16",
        "require_fp8",
        "require_huggingface_suite",
        "require_mlu",
        "require_mps",
        "require_multi_device",
        "require_multi_gpu",
        "require_multi_gpu_or_xpu",
        "require_multi_xpu",
        "require_musa",
        "require_non_cpu",
        "require_non_hpu",
        "require_non_torch_xla",
        "require_non_xpu",
        "require_npu",
        "require_pippy",
        "require_sdaa",
        "require_single_device",
        "require_single_gpu",
        "require_single_xpu",
        "require_torch_min_version",
        "require_torchao",
        "require_torchvision",
        "require_tpu",
        "require_transformer_engine",
        "require_transformer_engine_mxfp8",
        "require_xpu",
        "run_first",
        "skip",
        "slow",
    ),
    "test_utils.scripts": ("test_ops", "test_script", "test_sync"),
    "test_utils.testing": ("are_the_same_tensors", "assert_exception", "capture_call_output"),
    "test_utils.training": ("RegressionDataset", "RegressionModel"),
}
_MODULE_OF: dict[str, str] = {name: f"accelerate_cpp.{module}" for module, names in _NAMES.items() for name in names}
_SUBMODULES = frozenset({*(module.removeprefix("test_utils.") for module in _NAMES), "examples"})

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = lazy_names(__name__, globals(), _MODULE_OF, _SUBMODULES)
