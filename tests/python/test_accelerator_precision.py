"""Mixed precision through the façade, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.state import AcceleratorState, GradientState
from accelerate_cpp.utils.dataclasses import AutocastKwargs, GradScalerKwargs


@pytest.fixture(autouse=True)
def no_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_prepared_model_computes_in_it_and_returns_fp32(precision: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    out = model(torch.randn(2, 4))
    assert out.dtype == torch.float32
    assert torch.equal(out, out.to(dtype).float())
    assert accelerator.native_amp
    assert hasattr(model, "_original_forward")


def test_a_model_prepared_for_evaluation_computes_in_it_too() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(torch.nn.Linear(4, 4), evaluation_mode=True)
    assert hasattr(model, "_original_forward")


def test_results_can_stay_in_low_precision() -> None:
    handler = AutocastKwargs(outputs_in_fp32=False, cache_enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
    assert accelerator.prepare(torch.nn.Linear(4, 4))(torch.randn(2, 4)).dtype == torch.bfloat16


def test_the_model_gets_its_own_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    x = torch.randn(2, 4)
    cast = model(x)
    assert accelerator.unwrap_model(model) is model
    assert torch.equal(model(x), cast)
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert not hasattr(unwrapped, "_original_forward")
    assert not torch.equal(unwrapped(x), cast)


def test_autocast_follows_the_precision_and_the_handler() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with accelerator.autocast(AutocastKwargs()):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_only_fp16_has_a_scaler_and_its_options_count() -> None:
    handler = GradScalerKwargs(init_scale=16.0, growth_interval=3)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    assert accelerator.scaler is not None
    assert (accelerator.scaler.get_scale(), accelerator.scaler.get_growth_interval()) == (16.0, 3)
    assert accelerator.scaler_handler is handler
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler]).scaler is None


def test_gradients_are_scaled_until_they_are_clipped_or_stepped_on() -> None:
    handler = GradScalerKwargs(init_scale=16.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def gradient() -> float:
        model.zero_grad()
        accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
        return float(model.weight.grad)

    assert gradient() == 48.0
    assert accelerator.clip_grad_norm_(model.parameters(), 1.5).item() == 3.0
    torch.testing.assert_close(model.weight.grad, torch.full((1, 1), 1.5))
    assert accelerator.clip_grad_norm_(model.parameters(), 9.0).item() == pytest.approx(1.5)
    optimizer.step()
    assert gradient() == 48.0
    accelerator.clip_grad_value_(model.parameters(), 2.0)
    assert model.weight.grad.item() == 2.0
    optimizer.step()
    assert gradient() == 48.0
    accelerator.unscale_gradients(optimizer)
    assert model.weight.grad.item() == 3.0
    before = model.weight.item()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 3.0)


def test_an_overflow_skips_the_step() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert model.weight.item() == before
    assert accelerator.scaler.get_scale() == 2.0


def test_the_environment_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"


def test_micro_batches_add_up_even_when_each_is_clipped() -> None:
    handler = GradScalerKwargs(init_scale=16.0)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[handler]
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 3.0).item())
            accelerator.unscale_gradients()
            accelerator.clip_grad_value_(model.parameters(), 100.0)
            optimizer.step()
    assert norms == pytest.approx([4.0, 7.0])  # 8 / 2; then 3, to which that was clipped, and 4
    assert model.weight.item() == pytest.approx(-3.0)
