"""Decorators that skip tests."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import accelerate.test_utils.testing as original
import pytest

from accelerate_cpp.test_utils import backend, requirements
from accelerate_cpp.utils import imports

ALL = {name for name in requirements.__all__ if name.startswith("require_")} - {"require_torch_min_version"}
LIBRARIES = {
    "require_aim": {"aim"},
    "require_bnb": {"bitsandbytes"},
    "require_clearml": {"clearml"},
    "require_comet_ml": {"comet_ml"},
    "require_datasets": {"datasets"},
    "require_deepspeed": {"deepspeed"},
    "require_dvclive": {"dvclive"},
    "require_fp8": {"torchao"},
    "require_huggingface_suite": {"transformers", "datasets"},
    "require_import_timer": {"import_timer"},
    "require_matplotlib": {"matplotlib"},
    "require_mlflow": {"mlflow"},
    "require_pandas": {"pandas"},
    "require_peft": {"peft"},
    "require_pippy": {"torch"},
    "require_schedulefree": {"schedulefree"},
    "require_swanlab": {"swanlab"},
    "require_tensorboard": {"tensorboardX"},
    "require_timm": {"timm"},
    "require_torchao": {"torchao"},
    "require_torchdata_stateful_dataloader": {"torchdata"},
    "require_torchvision": {"torchvision"},
    "require_trackers": {"wandb"},
    "require_trackio": {"trackio"},
    "require_transformer_engine": {"transformer_engine"},
    "require_transformers": {"transformers"},
    "require_triton": {"triton"},
    "require_wandb": {"wandb"},
}
ANYWHERE = {"require_non_hpu", "require_non_xpu"}
ONE, SEVERAL = {"require_non_cpu", "require_single_device"}, {"require_non_cpu", "require_multi_device"}
ON_GPU = {"require_cuda", "require_cuda_or_xpu", "require_cuda_or_hpu"}
DEVICES = {
    ("cpu", 1): ANYWHERE | {"require_cpu"},
    ("cuda", 1): ANYWHERE | ONE | ON_GPU | {"require_single_gpu"},
    ("cuda", 2): ANYWHERE | SEVERAL | ON_GPU | {"require_multi_gpu", "require_multi_gpu_or_xpu"},
    ("xpu", 1): {"require_non_hpu"} | ONE | {"require_xpu", "require_cuda_or_xpu", "require_single_xpu"},
    ("xpu", 2): {"require_non_hpu", "require_multi_gpu_or_xpu", "require_multi_xpu"}
    | SEVERAL
    | {"require_xpu", "require_cuda_or_xpu"},
    ("hpu", 8): {"require_non_xpu", "require_cuda_or_hpu"} | SEVERAL,
    ("mps", 1): ANYWHERE | ONE | {"require_mps"},
    **{(kind, 2): ANYWHERE | SEVERAL | {f"require_{kind}"} for kind in ("npu", "mlu", "sdaa", "musa", "neuron")},
}
# Of them the tests of single decorators tell.
APART = {
    "require_fp16",
    "require_fp8",
    "require_fsdp2",
    "require_non_torch_xla",
    "require_tp",
    "require_tpu",
    "require_transformer_engine_mxfp8",
}


def skipped(decorator: Callable[[Any], Any]) -> str | None:
    """Why a test is skipped; ``None`` when it runs."""

    def test() -> str:
        return "ran"

    decorated = decorator(test)
    try:
        assert decorated() == "ran"
    except unittest.SkipTest as reason:
        return str(reason)
    return None


def that_run(names: set[str]) -> set[str]:
    return {name for name in names if skipped(getattr(requirements, name)) is None}


@pytest.mark.parametrize(("device", "expected"), DEVICES.items(), ids=map(str, DEVICES))
def test_devices_decide_what_runs(monkeypatch: pytest.MonkeyPatch, device: tuple[str, int], expected: set[str]) -> None:
    monkeypatch.setattr(backend, "torch_device", device[0])
    monkeypatch.setattr(backend, "device_count", device[1])
    assert that_run(ALL - LIBRARIES.keys() - APART) == expected


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_decides_what_runs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    decorator = getattr(requirements, name)
    monkeypatch.setattr(imports, "_is_installed", lambda module, *_, **__: module in LIBRARIES[name])
    assert skipped(decorator) is None
    for missing in LIBRARIES[name]:
        monkeypatch.setattr(imports, "_is_installed", lambda module, *_, missing=missing, **__: module != missing)
        if len(LIBRARIES[name]) > 1:
            assert skipped(decorator) is not None
    monkeypatch.setattr(imports, "_is_installed", lambda *_, **__: False)
    reason = skipped(decorator)
    assert reason is not None
    assert reason.startswith("test requires ")
    assert decorator.__name__ == name


def test_all_names_of_the_original_are_there() -> None:
    assert {name for name in dir(original) if name.startswith("require_")} <= set(requirements.__all__)


@pytest.mark.parametrize(("has", "name"), [(False, "require_fp16"), (True, "require_fp16")])
def test_fp16_is_asked_for(monkeypatch: pytest.MonkeyPatch, has: bool, name: str) -> None:
    decorator = requirements._requires("x", lambda: has)
    assert (skipped(decorator) is None) is has
    assert skipped(getattr(requirements, name)) is None  # the CPU has it


@pytest.mark.parametrize(
    ("kind", "capable", "runs"), [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)]
)
def test_a_gpu_without_fp8_is_not_enough(monkeypatch: pytest.MonkeyPatch, kind: str, capable: bool, runs: bool) -> None:
    monkeypatch.setattr(imports, "_is_installed", lambda module, *_, **__: module == "torchao")
    monkeypatch.setattr(backend, "torch_device", kind)
    monkeypatch.setattr(requirements, "check_cuda_fp8_capability", lambda: capable)
    assert (skipped(requirements.require_fp8) is None) is runs


@pytest.mark.parametrize("blocks", [True, False])
def test_scales_of_blocks_are_asked_of_the_gpu(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    monkeypatch.setattr(imports, "is_transformer_engine_available", lambda: True)
    fp8 = SimpleNamespace(check_mxfp8_support=lambda: (blocks, "why"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    assert (skipped(requirements.require_transformer_engine_mxfp8) is None) is blocks


@pytest.mark.parametrize("tpu", [True, False])
def test_a_tpu_is_asked_for(monkeypatch: pytest.MonkeyPatch, tpu: bool) -> None:
    monkeypatch.setattr(imports, "is_torch_xla_available", lambda check_is_tpu=False: tpu)
    assert (skipped(requirements.require_tpu) is None) is tpu
    assert (skipped(requirements.require_non_torch_xla) is None) is not tpu


@pytest.mark.parametrize(
    ("versions", "runs"),
    [({"torch": True, "transformers": True}, True), ({"torch": True}, False), ({"transformers": True}, False)],
)
def test_versions_are_asked_for(monkeypatch: pytest.MonkeyPatch, versions: dict[str, bool], runs: bool) -> None:
    monkeypatch.setattr(imports, "_is_installed", lambda *_, **__: True)
    monkeypatch.setattr(requirements, "compare_versions", lambda name, *_: versions.get(name, False))
    monkeypatch.setattr(requirements, "is_torch_version", lambda *_: versions.get("torch", False))
    assert (skipped(requirements.require_tp) is None) is runs
    assert (skipped(requirements.require_fsdp2) is None) is versions.get("torch", False)


@pytest.mark.parametrize(("version", "runs"), [("1.0", True), ("99.0", False)])
def test_torch_has_to_be_new_enough(version: str, runs: bool) -> None:
    reason = skipped(requirements.require_torch_min_version(version=version))
    assert reason == (None if runs else f"test requires torch version >= {version}")
    assert (skipped(lambda test: requirements.require_torch_min_version(test, version)) is None) is runs
    with pytest.raises(TypeError, match="pass version="):
        requirements.require_torch_min_version(lambda: None)


@pytest.mark.parametrize(("text", "runs"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_slow_tests_run_when_asked(monkeypatch: pytest.MonkeyPatch, text: str, runs: bool) -> None:
    monkeypatch.setenv("RUN_SLOW", text)
    assert (skipped(requirements.slow) is None) is runs


def test_a_class_can_be_skipped() -> None:
    @requirements.skip
    class Case(unittest.TestCase):
        def test_it(self) -> None:
            raise AssertionError("ran")

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert [reason for _, reason in result.skipped] == ["Test was skipped"]
    assert result.errors == []


def test_a_test_can_be_the_first_where_there_is_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []

    class Mark:
        @staticmethod
        def order(number: int) -> Callable[[Any], Any]:
            marks.append(number)
            return lambda test: test

    monkeypatch.setattr(pytest, "mark", Mark)
    assert skipped(requirements.run_first) is None
    assert marks == [1]
    monkeypatch.delitem(sys.modules, "pytest")
    assert skipped(requirements.run_first) is None
    assert marks == [1]


def test_pytest_is_not_imported() -> None:
    import subprocess

    script = "import sys, accelerate_cpp.test_utils.testing; print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
