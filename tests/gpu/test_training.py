"""Training on one GPU by an ``Accelerator`` computes what a loop of torch alone computes, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accelerate_cpp import Accelerator
from accelerate_cpp.utils import GradScalerKwargs

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 10
# Twice the scale of a loss at which gradients of the first steps overflow in fp16.
SCALE = 2.0**22


def network() -> nn.Module:
    """A convolutional network for images of shape (1, 8, 8), the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()
    ).append(nn.Linear(64, 10))


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 1, 8, 8, generator=generator).cuda(), torch.randint(10, (32,), generator=generator).cuda())
        for _ in range(count)
    ]


def by_torch(precision: str, max_norm: float | None, accumulated: int = 1) -> dict[str, Any]:
    """The weights after the steps, the norms of the gradients, and the scales of the loss."""
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE, growth_interval=3, enabled=precision == "fp16")
    norms, scales = [], []
    for step, (images, labels) in enumerate(batches(STEPS * accumulated)):
        with torch.autocast("cuda", dtype=DTYPES[precision], enabled=precision != "no"):
            logits = model(images)
        scaler.scale(cross_entropy(logits.float(), labels) / accumulated).backward()
        if (step + 1) % accumulated:
            continue
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"weights": [weight.detach() for weight in model.parameters()], "norms": norms, "scales": scales}


def by_accelerator(precision: str, max_norm: float | None, accumulated: int = 1) -> dict[str, Any]:
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulated,
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE, growth_interval=3)],
    )
    assert accelerator.device == torch.device("cuda", 0)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    norms, scales, skipped = [], [], 0
    for images, labels in batches(STEPS * accumulated):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(images), labels))
            if not accelerator.sync_gradients:
                continue
            if max_norm is not None:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
            scales.append(1.0 if accelerator.scaler is None else accelerator.scaler.get_scale())
    if precision == "fp16":
        assert 0 < skipped < STEPS, "the scale is not one at which some steps overflow and others do not"
    weights = [weight.detach() for weight in accelerator.unwrap_model(model).parameters()]
    return {"weights": weights, "norms": norms, "scales": scales}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("precision", DTYPES)
def test_a_step_is_that_of_torch(precision: str, max_norm: float | None) -> None:
    own, expected = by_accelerator(precision, max_norm), by_torch(precision, max_norm)
    assert own["scales"] == expected["scales"]
    assert own["norms"] == pytest.approx(expected["norms"], rel=1e-6, nan_ok=True)
    for weight, other in zip(own["weights"], expected["weights"], strict=True):
        assert weight.device == torch.device("cuda", 0)
        torch.testing.assert_close(weight, other, rtol=0 if max_norm is None else 1e-6, atol=0)


@pytest.mark.parametrize("precision", DTYPES)
def test_accumulated_micro_batches_are_those_of_torch(precision: str) -> None:
    own, expected = by_accelerator(precision, None, 3), by_torch(precision, None, 3)
    assert own["scales"] == expected["scales"]
    for weight, other in zip(own["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=0)


def test_a_compiled_model_trains_like_the_model() -> None:
    accelerator = Accelerator(dynamo_backend="inductor")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    expected = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    expected.load_state_dict(model.state_dict())
    expected.cuda()
    compiled, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    data, labels = torch.randn(16, 64, device="cuda"), torch.randint(10, (16,), device="cuda")
    for _ in range(3):
        for module, stepping in ((compiled, optimizer), (expected, plain)):
            stepping.zero_grad()
            accelerator.backward(cross_entropy(module(data), labels))
            stepping.step()
    own = accelerator.unwrap_model(compiled, keep_torch_compile=False).parameters()
    for weight, other in zip(own, expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_layers_in_fp8_train_as_torchao_trains_them() -> None:
    torchao = pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    from accelerate_cpp.utils import AORecipeKwargs

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16))

    def inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name in ("1", "2")

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = layers().cuda()
    torchao.convert_to_float8_training(expected, module_filter_fn=inner, config=AORecipeKwargs().config)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    data = torch.randn(32, 32, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(data).pow(2).mean())
        optimizer.step()
        plain.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = expected(data)
        result.float().pow(2).mean().backward()
        plain.step()
    kinds = [type(module).__name__ for module in accelerator.unwrap_model(model)]
    assert kinds == [type(module).__name__ for module in expected]
    for weight, other in zip(accelerator.unwrap_model(model).parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=0)


def test_a_profile_shows_the_kernels_of_the_device() -> None:
    accelerator = Accelerator()
    data = torch.randn(256, 256, device=accelerator.device)
    with accelerator.profile() as profiler:
        data @ data
        torch.cuda.synchronize()
    assert any(event.key == "aten::mm" and event.device_time_total > 0 for event in profiler.key_averages())
