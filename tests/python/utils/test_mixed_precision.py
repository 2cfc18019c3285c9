"""Contexts and scalers for loops of one's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accelerate_cpp import AutocastKwargs
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import DistributedType
from accelerate_cpp.precision.grad_scaler import GradScaler
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.utils import get_grad_scaler, get_mixed_precision_context_manager, mixed_precision


@pytest.fixture(autouse=True)
def _no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def computed_in(native_amp: bool, options: AutocastKwargs | None = None) -> torch.dtype:
    with get_mixed_precision_context_manager(native_amp, options):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_operations_compute_in_the_precision_of_the_run(precision: str, dtype: torch.dtype) -> None:
    AcceleratorState(mixed_precision=precision, cpu=True)
    assert computed_in(native_amp=True) == dtype
    assert computed_in(native_amp=False) == torch.float32
    assert computed_in(native_amp=True, options=AutocastKwargs(enabled=False)) == torch.float32


def test_options_reach_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    given: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "autocast", lambda *_, **options: given.append(options) or nullcontext())
    get_mixed_precision_context_manager(True, AutocastKwargs(cache_enabled=False))
    assert given == [{"dtype": torch.bfloat16, "enabled": True, "cache_enabled": False}]


def test_without_a_run_there_is_no_precision() -> None:
    assert isinstance(get_mixed_precision_context_manager(False), nullcontext)
    with pytest.raises(InvalidArgument, match="create an Accelerator first"):
        get_mixed_precision_context_manager(True)


@pytest.mark.parametrize("with_a_run", [True, False])
def test_a_scaler_for_this_machine_scales(with_a_run: bool) -> None:
    if with_a_run:
        AcceleratorState(cpu=True)
    scaler = get_grad_scaler(DistributedType.MULTI_CPU, init_scale=8.0)
    assert isinstance(scaler, GradScaler)
    assert (scaler.is_enabled(), scaler.get_scale()) == (True, 8.0)
    assert scaler.scale(torch.ones(())).item() == 8.0


def test_the_accelerator_of_this_machine_counts_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "available_accelerators", lambda: [("xpu", 1)])
    assert get_grad_scaler(enabled=False)._device == "xpu"
    assert isinstance(get_grad_scaler(device="cpu"), GradScaler)


@pytest.mark.parametrize("kind", ["FSDP", DistributedType.FSDP])
def test_sharded_gradients_have_a_scaler_of_their_own(kind: str) -> None:
    scaler = get_grad_scaler(kind, init_scale=4.0)
    assert isinstance(scaler, ShardedGradScaler)
    assert scaler.get_scale() == 4.0
