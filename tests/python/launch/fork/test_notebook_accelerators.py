from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accelerate_cpp.devices.table  # noqa: F401  (with the real torch, which tests replace)
from accelerate_cpp.launch.fork import notebook_accelerators as accelerators
from accelerate_cpp.launch.fork.notebook_accelerators import (
    gpu_count,
    has_tpu,
    initialised,
    started_library,
)
from accelerate_cpp.launch.plan import host_resources


def _torch(cuda: Any = None, hip: Any = None, xpu: Any = None, **state: Any) -> SimpleNamespace:
    def devices(name: str, count: int) -> SimpleNamespace:
        return SimpleNamespace(is_initialized=lambda: state.get(f"{name}_used", False), device_count=lambda: count)

    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=hip, xpu=xpu), cuda=devices("cuda", 3), xpu=devices("xpu", 2)
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the torch that is to be the loaded one."""
    monkeypatch.setattr(host_resources, "gpu_count", lambda environ: 8)
    return lambda torch: monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize("state", [{}, {"cuda_used": True, "xpu_used": True}])
def test_gpus_are_counted_for_the_kind_that_torch_is_built_for(load: Any, state: dict[str, bool]) -> None:
    for build, expected in (({"cuda": "13.0"}, 8), ({"hip": "7.0"}, 3), ({"xpu": "2025"}, 2), ({}, 0)):
        load(_torch(**build, **state))
        assert gpu_count({}) == expected
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_without_torch_the_nodes_of_gpus_are_counted(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_count({}) == 8


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        ({}, (), False),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, (), True),
        ({"TPU_WORKER_ID": "0"}, (), True),
        ({"PJRT_DEVICE": "TPU"}, (), True),
        ({"PJRT_DEVICE": "CPU"}, (), False),
        ({}, ("accel0", "accel1"), True),
        ({}, ("accelerometer",), False),
        ({}, ("vfio/vfio",), False),
        ({}, ("vfio/0",), True),
    ],
)
def test_a_tpu_shows_in_variables_or_nodes(
    environ: dict[str, str], nodes: tuple[str, ...], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        (tmp_path / node).parent.mkdir(exist_ok=True)
        (tmp_path / node).touch()
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: name == "torch_xla" or None)
    assert has_tpu(environ, tmp_path) is expected


def test_without_torch_xla_there_is_no_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: None)
    assert not has_tpu({"TPU_NAME": "local"}, tmp_path)


def test_a_gpu_that_nobody_used_is_not_initialised(load: Any, tmp_path: Path) -> None:
    load(_torch(cuda="13.0"))
    assert initialised(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "hip", "name"),
    [("cuda", None, "CUDA"), ("cuda", "6.0", "ROCm"), ("xpu", None, "XPU"), ("npu", None, "NPU")],
)
def test_torch_tells_what_it_has_initialised(
    kind: str, hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert initialised(tmp_path) is None
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, kind, SimpleNamespace(is_initialized=lambda: True), raising=False)
    assert initialised(tmp_path) == name


@pytest.mark.parametrize(
    ("target", "kind"), [("/dev/nvidia-uvm", "CUDA"), ("/dev/kfd", "ROCm"), ("/dev/nvidiactl", None)]
)
def test_open_nodes_tell_what_other_libraries_have_initialised(
    target: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "3").symlink_to(target)
    assert initialised(tmp_path) == kind


def test_nothing_is_initialised_here() -> None:
    assert initialised() is None


@pytest.mark.parametrize(
    ("module", "idle", "used", "library"),
    [
        ("jax._src.xla_bridge", {"_backends": {}}, {"_backends": {"cpu": object()}}, "JAX"),
        (
            "tensorflow.python.eager.context",
            {"_context": SimpleNamespace(_context_handle=None)},
            {"_context": SimpleNamespace(_context_handle=object())},
            "TensorFlow",
        ),
        ("tensorflow.python.eager.context", {"_context": None}, {}, None),
    ],
)
def test_a_library_counts_once_it_has_started_not_when_it_is_imported(
    module: str, idle: dict[str, Any], used: dict[str, Any], library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started_library() is None
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**idle))  # type: ignore[arg-type]
    assert started_library() is None
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**used))  # type: ignore[arg-type]
    assert started_library() == library
