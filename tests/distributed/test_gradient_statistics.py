"""What the reduction measures on the way spares passes over gradients, and is measured again when it may be stale.

The same holds for what an accelerator keeps to itself; here a process group of torch sums gradients of the CPU as if
they were on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from processes import run_processes
from scenarios import Ranks, Scenarios

SCENARIOS = Scenarios()


def run_scenarios(through_group: bool) -> dict[str, str]:
    return SCENARIOS.run(through_group)


@pytest.fixture(scope="module", params=[(2, False), (3, False), (2, True), (3, True)], ids=str)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    size, through_group = request.param
    return run_processes(run_scenarios, size, through_group)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    found = [failure[name] for failure in failures if name in failure]
    assert not found, "\n".join(found)


def known(ranks: Ranks, parameters: Any) -> list[Any]:
    """What is known of each gradient: the sum of its squares and the number of its non-finite elements, or None."""
    from accelerate_cpp._native import known_device_statistics, known_statistics

    parameters = list(parameters)
    numbers, rows = known_statistics(parameters), known_device_statistics(parameters)
    none = rows if ranks.device_group is None else numbers
    assert none == [None] * len(none)
    return numbers if ranks.device_group is None else [None if row is None else tuple(row.tolist()) for row in rows]


def scaler_of(ranks: Ranks, **options: Any) -> Any:
    from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
    from accelerate_cpp.precision.grad_scaler import GradScaler

    return GradScaler(**options) if ranks.device_group is None else DeviceGradScaler("cpu", **options)


def trained(ranks: Ranks) -> Any:
    """A model after a backward pass in which the reduction measured: it does once somebody has asked."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = ranks.wrap(nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3)))
    for step in range(2):
        known(ranks, model.parameters())
        model.zero_grad()
        model(ranks.batch(step, 8, 6)).pow(2).sum().backward()
    return model


@SCENARIOS.add
def the_sum_of_squares_is_that_of_the_average(ranks: Ranks) -> None:
    from accelerate_cpp._native import measure_gradients

    model = trained(ranks)
    found = known(ranks, model.parameters())
    measured = measure_gradients([parameter.grad for parameter in model.parameters()])
    for statistics, (squares, non_finite) in zip(found, measured, strict=True):
        assert statistics is not None
        assert statistics[0] == pytest.approx(squares, rel=1e-12)
        assert statistics[1] == non_finite == 0


@SCENARIOS.add
def gradients_of_the_next_pass_are_measured_again(ranks: Ranks) -> None:
    model = trained(ranks)
    parameters = list(model.parameters())
    before = known(ranks, parameters)
    model(ranks.batch(5, 8, 6)).pow(2).sum().backward()  # accumulates
    after = known(ranks, parameters)
    assert None not in after
    assert after != before


def _changes() -> dict[str, Callable[[Any, Any], object]]:
    import torch

    def local_pass(model: Any, parameter: Any) -> None:
        with model.no_sync():
            model(torch.ones(2, 6)).sum().backward()

    return {
        "in place": lambda model, parameter: parameter.grad.mul_(3),
        "through .data": lambda model, parameter: parameter.grad.data.mul_(3),
        "through NumPy": lambda model, parameter: parameter.grad.numpy().fill(7),
        "through DLPack": lambda model, parameter: torch.from_dlpack(parameter.grad).mul_(3),
        "by another tensor": lambda model, parameter: setattr(parameter, "grad", torch.ones_like(parameter)),
        "by clearing": lambda model, parameter: model.zero_grad(),
        "by a pass that stays local": local_pass,
    }


@SCENARIOS.add
def a_gradient_that_may_have_changed_is_measured_again(ranks: Ranks) -> None:
    for name, change in _changes().items():
        model = trained(ranks)
        first = next(iter(model.parameters()))
        change(model, first)
        (found,) = known(ranks, [first])
        if first.grad is None:
            assert found is None, name
        else:
            assert found[0] == pytest.approx(first.grad.double().square().sum().item(), rel=1e-6), name


@SCENARIOS.add
def memory_that_python_kept_from_an_earlier_pass_is_measured_again(ranks: Ranks) -> None:
    model = trained(ranks)
    first = next(iter(model.parameters()))
    kept = first.grad.numpy()
    model(ranks.batch(5, 8, 6)).pow(2).sum().backward()
    kept.fill(7)
    assert known(ranks, [first])[0][0] == pytest.approx(49.0 * first.numel())


@SCENARIOS.add
def figures_of_an_earlier_step_are_not_believed_after_steps_that_nobody_measured(ranks: Ranks) -> None:
    import torch

    from accelerate_cpp.parallel.clipping import clip_grad_norm

    ours, theirs = ranks.pair(lambda: torch.nn.Linear(6, 3))
    for step in range(40):
        for model in (ours, theirs):
            model.zero_grad()
            (model(ranks.batch(step, 8, 6)).pow(2).sum() * (step + 1)).backward()
        if step in (0, 1, 2, 20, 39):
            norm = clip_grad_norm(ours.parameters(), 1.0)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))


@SCENARIOS.add
def ranks_clip_alike_although_one_of_them_has_looked_at_its_gradients(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.grad_scaler import unscale_all

    for scaled in (False, True):
        torch.manual_seed(0)
        model = ranks.wrap(torch.nn.Sequential(torch.nn.Linear(6, 5000), torch.nn.Tanh(), torch.nn.Linear(5000, 3)))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of(ranks, init_scale=1000.0)
        for step in range(20):
            optimizer.zero_grad()
            loss = model(ranks.batch(step, 8, 6)).pow(2).sum()
            (scaler.scale(loss) if scaled else loss).backward()
            if ranks.rank == 1:
                assert sum(float(parameter.grad.sum()) for parameter in model.parameters()) != 0.0  # for a log
            parameters = list(model.parameters())
            measured = unscale_all(scaler, [optimizer], left=parameters) if scaled else None
            norm = clip_grad_norm(parameters, 0.5, measured=measured)
            scaler.step(optimizer) if scaled else optimizer.step()
            if scaled:
                scaler.update()
            all_norms = [torch.zeros_like(norm) for _ in range(ranks.size)]
            dist.all_gather(all_norms, norm)
            assert len({one.item() for one in all_norms}) == 1, f"step {step}: {all_norms}"
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        everywhere = [torch.zeros_like(flat) for _ in range(ranks.size)]
        dist.all_gather(everywhere, flat)
        assert all(torch.equal(one, flat) for one in everywhere)


@SCENARIOS.add
def clipping_equals_torchs_whether_the_norm_is_known_or_not(ranks: Ranks) -> None:
    import torch

    from accelerate_cpp.parallel.clipping import clip_grad_norm

    for looks in (False, True):
        model = trained(ranks)
        if looks:
            copies = [parameter.grad.clone() for parameter in model.parameters()]
        norm = clip_grad_norm(model.parameters(), 0.5)
        if looks:
            others = [torch.nn.Parameter(parameter.detach()) for parameter in model.parameters()]
            for other, copy in zip(others, copies, strict=True):
                other.grad = copy
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, 0.5))
        clipped = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        torch.testing.assert_close(clipped, torch.tensor(0.5))


@SCENARIOS.add
def an_overflow_on_one_rank_leaves_out_the_step_on_all_and_halves_the_scale(ranks: Ranks) -> None:
    import torch

    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.grad_scaler import unscale_all

    torch.manual_seed(0)
    model = ranks.wrap(torch.nn.Linear(6, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of(ranks, init_scale=8.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = scaler.scale(model(ranks.batch(step, 8, 6)).pow(2).sum())
        bad = step in (2, 4) and ranks.rank == 1
        (loss * float("inf") if bad else loss).backward()
        before = model.module.weight.detach().clone()
        parameters = list(model.parameters())
        norm = clip_grad_norm(parameters, 1.0, measured=unscale_all(scaler, [optimizer], left=parameters))
        assert torch.isfinite(norm).item() == (step not in (2, 4))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.module.weight) == (step in (2, 4))
    assert scaler.get_scale() == 2.0


@SCENARIOS.add
def un_scaling_and_clipping_at_once_equals_one_after_the_other(ranks: Ranks) -> None:
    import torch

    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.grad_scaler import unscale_all

    gradients = []
    for at_once in (True, False):
        model, scaler = trained(ranks), scaler_of(ranks, init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        model.zero_grad()
        scaler.scale(model(ranks.batch(9, 8, 6)).pow(2).sum()).backward()
        if not at_once:
            assert None not in known(ranks, parameters)
            optimizer.param_groups[0]["params"][0].grad.mul_(1)  # is not believed any more
        norm = clip_grad_norm(parameters, 0.5, measured=unscale_all(scaler, [optimizer], left=parameters))
        gradients.append([norm, *(parameter.grad.clone() for parameter in parameters)])
    for together, apart in zip(*gradients, strict=True):
        torch.testing.assert_close(together, apart)
