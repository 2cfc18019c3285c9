"""Which precision computes in what, and which one scales the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from accelerate_cpp.config.session_config import Fp8Config
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision import precision as precision_module
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
from accelerate_cpp.precision.fp8_transformer_engine import Casting
from accelerate_cpp.precision.grad_scaler import GradScaler
from accelerate_cpp.precision.precision import Precision, precision_for

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("no", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8", torch.bfloat16),
        (None, torch.float32),
    ],
)
def test_operations_compute_in_the_dtype_of_the_name(name: str | None, dtype: torch.dtype) -> None:
    with precision_for(name, CPU).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_options_reach_autocast() -> None:
    with precision_for("bf16", CPU).autocast({"enabled": False}):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_only_fp16_scales_the_loss() -> None:
    assert precision_for("no", CPU).make_scaler() is None
    assert precision_for("bf16", CPU).make_scaler({"init_scale": 2.0}) is None
    assert precision_for("fp8", CPU).make_scaler() is None
    scaler = precision_for("fp16", CPU).make_scaler({"init_scale": 8.0})
    assert isinstance(scaler, GradScaler)
    assert scaler.get_scale() == 8.0


def test_other_devices_keep_the_scaler_of_torch() -> None:
    scaler = Precision("fp16", torch.float16, "mps").make_scaler({"init_scale": 8.0})
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 8.0


def test_scaler_of_an_accelerator_spares_passes_where_our_reducer_has_measured_the_gradients() -> None:
    scaler = Precision("fp16", torch.float16, "mps").make_scaler({"init_scale": 8.0}, gradients_are_measured=True)
    assert type(scaler) is DeviceGradScaler
    assert scaler.get_scale() == 8.0


def test_forward_passes_run_in_the_casting_of_transformer_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(Casting):
        def __call__(self, training: bool) -> AbstractContextManager[None]:
            seen.append(training)
            return nullcontext()

    seen: list[bool] = []
    monkeypatch.setattr(precision_module, "require_device", lambda config, device: None)
    monkeypatch.setattr(precision_module.fp8_transformer_engine, "casting", lambda options: Noted(options, False))
    precision = precision_for("fp8", CPU, Fp8Config("TE", {"margin": 1}))
    assert precision.fp8_casting == Noted({"margin": 1}, False)
    with precision.forward_context({}, training=True):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert seen == [True]
    assert precision.make_scaler() is None


def test_ms_amp_scales_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "require_device", lambda config, device: None)
    assert precision_for("fp8", CPU, Fp8Config("MSAMP")).make_scaler() is not None


def test_the_library_has_to_compute_on_the_device() -> None:
    with pytest.raises(InvalidArgument, match="needs an NVIDIA GPU"):
        precision_for("fp8", CPU, Fp8Config("TE"))


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_needs_a_gpu_that_has_it(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Old GPU")
    if supported:
        assert precision_for("bf16", torch.device("cuda")).name == "bf16"
    else:
        with pytest.raises(InvalidArgument, match="Old GPU does not support bf16; use 'fp16' or 'no'"):
            precision_for("bf16", torch.device("cuda"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'fp17': expected one of no, fp16, bf16, fp8"):
        precision_for("fp17", CPU)
