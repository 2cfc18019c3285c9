"""Mixed precision in two real processes: ranks stay equal, and skip steps together."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

STEPS = 12


def accelerator(**arguments: Any) -> Any:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **arguments)


def trained(precision: str, ranks: int) -> dict[str, Any]:
    """Trains on the shares of ``ranks`` ranks, each in its process, or all of them in this one."""
    import torch

    from accelerate_cpp import GradScalerKwargs

    # A scale at which no step overflows: skipped ones would tell one process from two.
    run = accelerator(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        shares = [torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(ranks)]
        x = torch.cat(shares) if run.num_processes == 1 else shares[run.process_index]
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        run.backward(loss)
        norm = run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "norm": norm.item(),
        "parameters": [parameter.detach().numpy() for parameter in model.parameters()],
        "scale": None if run.scaler is None else run.scaler.get_scale(),
    }


def overflowing() -> list[tuple[bool, float, list[float], int]]:
    """An infinite loss on rank 1 alone, in the second of three steps."""
    import torch

    from accelerate_cpp import GradScalerKwargs

    run = accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    seen = []
    for step in range(3):
        loss = model(torch.ones(1, 2)).sum()
        run.backward(loss * float("inf") if step == 1 and run.process_index == 1 else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        weight = model.module.weight.detach().flatten().tolist()
        seen.append((run.optimizer_step_was_skipped, run.scaler.get_scale(), weight, scheduler.scheduler._step_count))
    return seen


def trained_in_bf16(masters: bool) -> dict[str, Any]:
    """Trains parameters stored in bf16 by steps that are too small for them, with or without copies in fp32."""
    import torch

    from accelerate_cpp import MasterWeights

    run = accelerator(mixed_precision="bf16")
    torch.manual_seed(run.process_index)  # the weights of rank 0 count
    model = torch.nn.Linear(8, 1, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = run.prepare(model, MasterWeights(optimizer) if masters else optimizer)
    start = model.module.weight.detach().float().clone()
    for step in range(50):
        x = torch.ones(4, 8) * (1 + run.process_index + step % 3)
        run.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = model.module.weight.detach().float()
    return {
        "weight": weight.flatten().tolist(),
        "moved": (start - weight).flatten().tolist(),
        "plan": {(str(group.storage_dtype), str(group.master_dtype)) for group in run.precision_plan(model).groups},
        "reduced": str(run.precision_plan(model).groups[0].reduce_dtype),
    }


def twice_backward() -> list[float]:
    """Two synchronised backward passes before one step, the loss scaled by 8."""
    import torch

    from accelerate_cpp import GradScalerKwargs

    run = accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = torch.nn.Linear(1, 1, bias=False)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        run.backward(model(torch.full((1, 1), 1.0 + run.process_index)).sum())
    scaled = model.module.weight.grad.item()
    run.unscale_gradients()
    return [scaled, model.module.weight.grad.item()]


def scenarios() -> dict[str, Any]:
    return {
        "trained": {precision: trained(precision, 2) for precision in ("no", "bf16", "fp16")},
        "overflowing": overflowing(),
        "twice": twice_backward(),
        "masters": {masters: trained_in_bf16(masters) for masters in (False, True)},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(scenarios, 2)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_processes(trained_alone, 1)[0]


def trained_alone() -> dict[str, Any]:
    return {precision: trained(precision, 2) for precision in ("no", "bf16", "fp16")}


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 3e-2), ("fp16", 5e-3)])
def test_two_processes_train_as_one(
    ranks: list[dict[str, Any]], alone: dict[str, Any], precision: str, tolerance: float
) -> None:
    together = ranks[0]["trained"][precision]["losses"]
    assert together == pytest.approx(alone[precision]["losses"], rel=tolerance)
    assert together[-1] < together[0]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_ranks_have_the_same_bits(ranks: list[dict[str, Any]], precision: str) -> None:
    first, second = (rank["trained"][precision] for rank in ranks)
    assert first["norm"] == second["norm"]
    assert first["scale"] == second["scale"]
    for own, other in zip(first["parameters"], second["parameters"], strict=True):
        assert (own == other).all()


def test_half_precisions_really_compute_in_them(ranks: list[dict[str, Any]]) -> None:
    trained = ranks[0]["trained"]
    assert len({tuple(trained[precision]["losses"]) for precision in trained}) == 3


def test_an_infinity_on_one_rank_makes_all_skip_and_halve_the_scale(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["overflowing"], ranks[1]["overflowing"]
    assert first == second
    (skipped, scale, weight, steps), (skipped_2, scale_2, weight_2, steps_2), (skipped_3, scale_3, _, steps_3) = first
    assert (skipped, skipped_2, skipped_3) == (False, True, False)
    assert (scale, scale_2, scale_3) == (8.0, 4.0, 4.0)
    assert weight == weight_2 == [0.5, 0.5]
    assert steps_2 == steps, "the schedule waits for the optimizer"
    assert steps_3 > steps_2


def test_synchronised_backward_passes_add_up_while_scaled(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["twice"] == ranks[1]["twice"] == [24.0, 3.0]


def test_ranks_step_alike_on_master_weights_which_keep_steps_too_small_for_bf16(ranks: list[dict[str, Any]]) -> None:
    plain, masters = (ranks[0]["masters"][kind] for kind in (False, True))
    for kind in (False, True):
        assert ranks[0]["masters"][kind]["weight"] == ranks[1]["masters"][kind]["weight"]
    # The mean over the ranks of 4 samples' inputs (1 + rank + step % 3) is 4 * (1.5 + step % 3).
    expected = sum(1e-4 * 4 * (1.5 + step % 3) for step in range(50))
    assert masters["moved"] == pytest.approx([expected] * 8, rel=0.05)
    assert max(abs(moved - expected) for moved in plain["moved"]) > 0.2 * expected
    assert masters["plan"] == {("torch.bfloat16", "torch.float32")}
    assert plain["plan"] == {("torch.bfloat16", "torch.bfloat16")}
    assert masters["reduced"] == "torch.bfloat16"
