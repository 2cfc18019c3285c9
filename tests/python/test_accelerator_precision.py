"""Mixed precision through the façade, in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
from accelerate_cpp.precision.grad_scaler import GradScaler
from accelerate_cpp.precision.master_weights import MasterWeights
from accelerate_cpp.runtime import current
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.utils.dataclasses import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8BackendType,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
)

SCALERS = [GradScaler, partial(torch.amp.GradScaler, "cpu"), partial(DeviceGradScaler, "cpu")]


@pytest.fixture(autouse=True)
def no_state(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND", raising=False)


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


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))


def in_fp8(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_in_fp8_the_optimizer_steps_on_the_layers_that_compute_in_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert in_fp8(model) == ["1"]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = torch.randn(8, 16)
    losses = []
    for _ in range(10):
        out = model(x)
        assert (out.dtype, out.shape) == (torch.float32, (8, 4))
        loss = (out - x[:, :4]).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert not any(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_in_fp8_everything_else_computes_in_bf16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = accelerator.prepare(network())
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 16))
    assert seen == [torch.bfloat16] * 3 + [torch.float32]
    with accelerator.autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert (accelerator.native_amp, accelerator.scaler) == (True, None)


def test_a_recipe_chooses_the_layers() -> None:
    handler = AORecipeKwargs(module_filter_func=lambda module, name: name == "0")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    assert in_fp8(accelerator.prepare(network())) == ["0"]
    assert accelerator.ao_recipe_handler is handler
    assert accelerator.te_recipe_handler is accelerator.fp8_recipe_handler is accelerator.msamp_recipe_handler is None
    second = Accelerator()
    assert in_fp8(second.prepare(network())) == ["1"], "without a recipe of its own it has the default one"
    assert in_fp8(accelerator.prepare_model(network())) == ["0"]


def test_what_a_program_puts_in_the_place_of_the_conversion_converts() -> None:
    from accelerate_cpp import accelerator as module

    own = module.convert_model_to_fp8_ao

    def all_but_named(model: Any, config: Any = None, module_filter_func: Any = None) -> None:
        assert module_filter_func is None
        own(model, config=config, module_filter_func=lambda layer, name: name == "0")

    with mock.patch.object(module, "convert_model_to_fp8_ao", all_but_named):
        assert in_fp8(Accelerator(cpu=True, mixed_precision="fp8").prepare(network())) == ["0"]
    assert in_fp8(Accelerator().prepare(network())) == ["1"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_prepared_model_in_fp8_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    handler = AORecipeKwargs(module_filter_func=lambda module, name: name == "1")
    model = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler]).prepare(network())
    x = torch.randn(2, 16)
    assert torch.equal(duplicate(model)(x), model(x))


def test_the_accelerator_says_what_computes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler) == (True, True)
    assert (accelerator.fp8_backend, accelerator.delayed_fp8_autocast) == (FP8BackendType.AO, False)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler) == (False, False)
    assert accelerator.fp8_backend is FP8BackendType.NO
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    assert accelerator.fp8_backend is FP8BackendType.TE


def test_fp8_without_its_library_or_a_recipe_without_fp8_is_refused_before_anything_starts(
    only_installed: Callable[..., None],
) -> None:
    with pytest.raises(InvalidArgument, match="MSAMPRecipeKwargs, but mixed_precision is 'no'"):
        Accelerator(cpu=True, kwargs_handlers=[MSAMPRecipeKwargs()])
    only_installed("transformer_engine")
    with pytest.raises(MissingLibrary, match=r"MSAMPRecipeKwargs: .*msamp.*TERecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])
    only_installed()
    with pytest.raises(MissingLibrary, match="torchao"):
        Accelerator(cpu=True, mixed_precision="fp8")
    assert current.session is None


def test_a_recipe_is_accepted_where_the_precision_is_chosen_already() -> None:
    AcceleratorState(mixed_precision="fp8", cpu=True, _from_accelerator=True)
    assert Accelerator(kwargs_handlers=[AORecipeKwargs()]).fp8_enabled


def test_the_plan_of_a_prepared_model_tells_what_computes_in_what() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = network()
    with pytest.raises(InvalidArgument, match=r"precision_plan: Sequential has not been prepared"):
        accelerator.precision_plan(model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model[:2].parameters()))
    assert str(accelerator.precision_plan(model)).splitlines() == [
        "mixed_precision='fp8' on cpu",
        "layer         parameters  elements  storage  compute        reduce  master",
        "Linear                 2       544  float32  bfloat16       -       float32",
        "Float8Linear           1     1,024  float32  float8_e4m3fn  -       float32",
        "Float8Linear           1        32  float32  bfloat16       -       float32",
        "Linear                 2       132  float32  bfloat16       -       -",
    ]


def test_the_plan_knows_parameters_in_bf16_and_a_forward_that_is_not_cast() -> None:
    off = AutocastKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[off])
    (group,) = accelerator.precision_plan(accelerator.prepare(torch.nn.Linear(2, 2).bfloat16())).groups
    assert (group.storage_dtype, group.compute_dtype) == (torch.bfloat16, torch.bfloat16)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert accelerator.precision_plan(model).groups[0].compute_dtype == torch.float32
    casting = Accelerator()
    model = casting.prepare(torch.nn.Linear(2, 2))
    assert casting.precision_plan(model).groups[0].compute_dtype == torch.bfloat16
    casting.unwrap_model(model, keep_fp32_wrapper=False)
    assert casting.precision_plan(model).groups[0].compute_dtype == torch.float32


def test_master_weights_train_a_model_in_bf16_through_the_accelerator() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = network().bfloat16()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=2**-6))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert {group.storage_dtype for group in accelerator.precision_plan(model).groups} == {torch.bfloat16}
    assert {group.master_dtype for group in accelerator.precision_plan(model).groups} == {torch.float32}
    x = torch.randn(8, 16)
    losses = []
    for _ in range(8):
        with accelerator.accumulate(model):
            loss = model(x.bfloat16()).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scheduler.get_last_lr() == [2**-10]
    assert optimizer.state_dict()["master_weights"][0].dtype == torch.float32


def test_with_master_weights_a_scaled_loss_is_unscaled_before_the_step() -> None:
    handler = GradScalerKwargs(init_scale=16.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0)))
    for value in (3.0, float("inf")):
        accelerator.backward(model(torch.full((1, 1), value)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.item() == -3.0
    assert accelerator.optimizer_step_was_skipped


def _line(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def _one(scaler: Callable[[], torch.amp.GradScaler]) -> tuple[Accelerator, Any, Any]:
    """A model with its optimizer, prepared, and the accelerator, which scales losses by ``scaler()``."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = scaler()
    return accelerator, *accelerator.prepare(*_line())


def test_a_model_is_clipped_before_the_backward_pass_of_another() -> None:
    """As a network and its judge are: the gradients of the second are un-scaled when they are there."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    (judge, of_judge), (model, of_model) = (accelerator.prepare(*_line()) for _ in range(2))
    inputs = torch.full((1, 1), 0.25)
    norms = []
    for one in (judge, model):
        accelerator.backward(one(inputs).sum() * 0.25)
        norms.append(accelerator.clip_grad_norm_(one.parameters(), 100.0).item())
    of_judge.step()
    of_model.step()
    expected, optimizer = _line()  # torch alone
    (expected(inputs).sum() * 0.25).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 100.0).item()
    optimizer.step()
    assert norms == [norm, norm]
    for one in (judge, model):
        torch.testing.assert_close(next(one.parameters()), next(expected.parameters()))


def test_a_schedule_that_is_prepared_before_its_optimizer_waits_for_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = _line()
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    schedule.step()
    assert optimizer.step_was_skipped
    assert schedule.get_last_lr() == [0.1]


@pytest.mark.parametrize("scaler", SCALERS)
def test_optimizers_that_are_clipped_together_step_on_gradients_that_are_un_scaled_once(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    """Also with the scalers that accelerators have, for several steps, of which one optimizer leaves out one."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = scaler()
    pairs = [accelerator.prepare(*_line()) for _ in range(2)]
    expected = [_line() for _ in range(2)]
    inputs = torch.full((1, 1), 0.25)
    for step in range(3):
        accelerator.backward(sum(model(inputs).sum() * 0.25 for model, _ in pairs))
        sum(model(inputs).sum() * 0.25 for model, _ in expected).backward()
        accelerator.clip_grad_norm_([one for model, _ in pairs for one in model.parameters()], 100.0)
        for number, (_, optimizer) in enumerate([*pairs, *expected]):
            if step != 1 or number % 2 == 0:
                optimizer.step()
            optimizer.zero_grad()
    for (model, _), (other, _) in zip(pairs, expected, strict=True):
        torch.testing.assert_close(next(model.parameters()), next(other.parameters()))


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("clips", [1, 2])
def test_a_backward_pass_adds_to_gradients_that_were_clipped_before(
    clips: int, scaler: Callable[[], torch.amp.GradScaler]
) -> None:
    """Of the same model, in several steps, without ``accumulate``."""
    accelerator, model, optimizer = _one(scaler)
    expected, of_expected = _line()
    inputs = torch.full((1, 1), 0.25)
    for _ in range(3):
        for part in range(2):
            accelerator.backward(model(inputs).sum() * 0.25)
            (expected(inputs).sum() * 0.25).backward()
            if part < clips:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.03)
                of_torch = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.03)
                torch.testing.assert_close(norm, of_torch)
        for one in (optimizer, of_expected):
            one.step()
            one.zero_grad()
        torch.testing.assert_close(next(model.parameters()), next(expected.parameters()))


@pytest.mark.parametrize("scaler", SCALERS)
def test_an_overflow_that_clipping_has_hidden_still_skips_the_step_after_another_pass(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    accelerator, model, optimizer = _one(scaler)
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert optimizer.step_was_skipped
    assert next(model.parameters()).item() == 1.0


@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_that_are_cleared_after_clipping_are_un_scaled_again(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    accelerator, model, optimizer = _one(scaler)
    for clears in (optimizer.zero_grad, optimizer.step):
        accelerator.backward(model(torch.full((1, 1), 0.25)).sum() * 0.5)
        assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(0.125)
        clears()
    assert next(model.parameters()).item() == pytest.approx(1.0 - 0.1 * 0.125)


def _two(scaler: Callable[[], torch.amp.GradScaler], **options: Any) -> tuple[Accelerator, list[Any], list[Any]]:
    """Two models with optimizers of their own, and the same in torch alone."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = scaler()
    pairs = [accelerator.prepare(*_line(**options)) for _ in range(2)]
    return accelerator, pairs, [_line() for _ in range(2)]


def _sum_of(pairs: list[Any]) -> torch.Tensor:
    total: torch.Tensor = sum(model(torch.full((1, 1), 0.25)).sum() * 0.25 for model, _ in pairs)
    return total


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_are_clipped_and_step_in_turn(fused: bool, scaler: Callable[[], torch.amp.GradScaler]) -> None:
    accelerator, pairs, expected = _two(scaler, fused=fused)
    for _ in range(3):
        accelerator.backward(_sum_of(pairs))
        _sum_of(expected).backward()
        for (model, optimizer), (other, of_other) in zip(pairs, expected, strict=True):
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
            for one in (optimizer, of_other):
                one.step()
                one.zero_grad()
    for (model, _), (other, _) in zip(pairs, expected, strict=True):
        torch.testing.assert_close(next(model.parameters()), next(other.parameters()))


@pytest.mark.parametrize("device_scaler", [GradScaler, torch.amp.GradScaler, DeviceGradScaler])
@pytest.mark.parametrize("overflows", [False, True])
def test_an_optimizer_un_scales_by_the_scale_of_its_pass_after_another_one_has_stepped(
    overflows: bool, device_scaler: Any
) -> None:
    """Where the scale grows in each step, or the other one's gradients overflow."""
    accelerator, pairs, _ = _two(partial(device_scaler, "cpu", growth_interval=1, init_scale=1024.0))
    if overflows:
        accelerator.backward(pairs[0][0](torch.ones(1, 1)).sum() * float("inf"))
    accelerator.backward(_sum_of(pairs[1:] if overflows else pairs))
    for _, optimizer in pairs:
        optimizer.step()
    assert pairs[0][1].step_was_skipped is overflows
    assert next(pairs[1][0].parameters()).item() == pytest.approx(1.0 - 0.1 * 0.0625)
    accelerator.backward(_sum_of(pairs))
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == (512.0 if overflows else 2048.0)


@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_that_are_set_to_zero_after_an_overflow_are_no_overflow(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    accelerator, model, optimizer = _one(scaler)
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad(set_to_none=False)
    accelerator.backward(model(torch.full((1, 1), 0.25)).sum() * 0.25)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert next(model.parameters()).item() == pytest.approx(1.0 - 0.1 * 0.0625)


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_scale_falls_where_a_program_leaves_steps_out_itself(scaler: Callable[[], torch.amp.GradScaler]) -> None:
    accelerator, model, optimizer = _one(scaler)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
        if not accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 65536.0 / 4


def test_gradients_that_are_un_scaled_stay_so_when_the_scaler_is_loaded() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = accelerator.prepare(*_line())
    accelerator.backward(model(torch.full((1, 1), 0.25)).sum() * 0.25)
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert accelerator.scaler is not None
    accelerator.scaler.load_state_dict(accelerator.scaler.state_dict())
    optimizer.step()
    assert next(model.parameters()).item() == pytest.approx(1.0 - 0.1 * 0.0625)


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_scale_is_saved_as_it_is_after_a_step(scaler: Callable[[], torch.amp.GradScaler], tmp_path: Path) -> None:
    accelerator, pairs, _ = _two(scaler)
    accelerator.backward(pairs[0][0](torch.ones(1, 1)).sum() * float("inf"))
    accelerator.backward(_sum_of(pairs[1:]))
    pairs[0][1].step()
    accelerator.save_state(str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 32768.0


@pytest.mark.parametrize("device_scaler", [GradScaler, torch.amp.GradScaler, DeviceGradScaler])
@pytest.mark.parametrize("overflows", [False, True])
def test_scaled_gradients_are_brought_to_the_scale_of_the_next_loss(overflows: bool, device_scaler: Any) -> None:
    """Those of one optimizer, while the gradients of another one are un-scaled and cleared."""
    scaler = partial(device_scaler, "cpu", growth_interval=1, init_scale=1024.0)
    accelerator, pairs, _ = _two(scaler)
    accelerator.backward(_sum_of(pairs))
    if overflows:
        accelerator.backward(pairs[0][0](torch.ones(1, 1)).sum() * float("inf"))
    accelerator.unscale_gradients(pairs[0][1])
    pairs[0][1].zero_grad()
    accelerator.backward(_sum_of(pairs[1:]))
    pairs[1][1].step()
    assert next(pairs[1][0].parameters()).item() == pytest.approx(1.0 - 0.1 * 2 * 0.0625)


@pytest.mark.parametrize("scaler", SCALERS)
def test_an_optimizer_that_steps_every_second_time_has_the_gradients_of_both(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    accelerator, pairs, _ = _two(scaler)
    accelerator.backward(_sum_of(pairs))
    pairs[0][1].step()
    pairs[0][1].zero_grad()
    accelerator.backward(pairs[0][0](torch.ones(1, 1)).sum() * float("inf"))
    pairs[0][1].step()
    pairs[0][1].zero_grad()
    accelerator.backward(_sum_of(pairs))
    pairs[1][1].step()
    assert next(pairs[1][0].parameters()).item() == pytest.approx(1.0 - 0.1 * 2 * 0.0625)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_program_that_scales_a_loss_itself_can_step_while_another_optimizer_waits(
    scaler: Callable[[], torch.amp.GradScaler],
) -> None:
    accelerator, pairs, _ = _two(scaler)
    accelerator.backward(_sum_of(pairs))
    pairs[0][1].step()
    pairs[0][1].zero_grad()
    assert accelerator.scaler is not None
    accelerator.scaler.scale(_sum_of(pairs[:1])).backward()
    pairs[0][1].step()
    assert next(pairs[0][0].parameters()).item() == pytest.approx(1.0 - 0.1 * 2 * 0.0625)
