"""The loss scaler behaves as torch's, and better where several optimizers share it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision.grad_scaler import GradScaler, overflowed, unscale_all


def _optimizer(gradient: float = 1.0, kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), gradient)
    return kind([parameter], **{"lr": 1.0, **options})


def _parameter(optimizer: torch.optim.Optimizer) -> torch.nn.Parameter:
    return optimizer.param_groups[0]["params"][0]  # type: ignore[no-any-return]


def test_it_is_one_of_torch_s_with_the_same_state() -> None:
    assert isinstance(GradScaler(), torch.amp.GradScaler)
    theirs = torch.amp.GradScaler("cpu")
    assert GradScaler().state_dict() == theirs.state_dict()
    theirs.load_state_dict({**theirs.state_dict(), "scale": 4.0, "_growth_tracker": 7})
    ours = GradScaler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_it_trains_as_with_torch(kind: str) -> None:
    def train(scaler: torch.amp.GradScaler) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        fused = {"fused": True} if kind == "fused" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **fused)
        for step in range(20):
            x = torch.randn(16, 8) * (1e30 if step % 7 == 3 else 1.0)
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            optimizer.zero_grad()
            scaler.scale(out.float().pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters()), scaler.state_dict()

    options = {"init_scale": 2.0**20, "growth_interval": 4}
    ours, our_state = train(GradScaler(**options))  # type: ignore[arg-type]
    theirs, their_state = train(torch.amp.GradScaler("cpu", **options))  # type: ignore[arg-type]
    assert our_state == their_state
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)


def test_what_the_reduction_has_measured_is_left_for_the_caller_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(parameters: list[torch.Tensor]) -> list[tuple[float, int] | None]:
        return [(192.0, 0)] * len(parameters)

    monkeypatch.setattr("accelerate_cpp.precision.grad_scaler.known_statistics", known)
    scaler, optimizer = GradScaler(init_scale=4.0), _optimizer(gradient=8.0)
    key = id(_parameter(optimizer))
    assert scaler.unscale_but(optimizer, frozenset([key])) == {key: (192.0, 0.25)}
    assert _parameter(optimizer).grad.tolist() == [8.0] * 3  # type: ignore[union-attr]
    assert scaler.is_unscaled(optimizer)


def test_an_overflow_that_the_reduction_has_counted_leaves_out_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(parameters: list[torch.Tensor]) -> list[tuple[float, int] | None]:
        return [(math.inf, 1)] * len(parameters)

    monkeypatch.setattr("accelerate_cpp.precision.grad_scaler.known_statistics", known)
    scaler, optimizer = GradScaler(init_scale=4.0), _optimizer(gradient=8.0)
    before = _parameter(optimizer).tolist()
    scaler.unscale_but(optimizer, frozenset([id(_parameter(optimizer))]))
    scaler.step(optimizer)
    scaler.update()
    assert _parameter(optimizer).tolist() == before
    assert scaler.get_scale() == 2.0


def test_gradients_are_unscaled_once() -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), _optimizer(gradient=8.0)
    assert not scaler.is_unscaled(optimizer)
    assert scaler.unscale_but(optimizer, frozenset()) == {id(_parameter(optimizer)): (12.0, 1.0)}
    assert _parameter(optimizer).grad.tolist() == [2.0] * 3  # type: ignore[union-attr]
    assert scaler.is_unscaled(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert _parameter(optimizer).tolist() == [-1.0] * 3
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="since the last update"):
        scaler.step(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_leaves_the_step_out_and_halves_the_scale(kind: Any, bad: float) -> None:
    fused = {"fused": True} if kind is torch.optim.AdamW else {}
    scaler, optimizer = GradScaler(init_scale=8.0), _optimizer(kind=kind, **fused)
    _parameter(optimizer).grad[1] = bad  # type: ignore[index]
    assert scaler.step(optimizer) is None
    assert overflowed(scaler, optimizer)
    scaler.update()
    assert _parameter(optimizer).tolist() == [1.0] * 3
    assert scaler.get_scale() == 4.0


def test_two_optimizers_on_one_backward_pass_use_one_scale_and_count_as_one_step() -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    first, second = _optimizer(gradient=8.0), _optimizer(gradient=8.0)
    for optimizer in (first, second):  # each followed by an update, as AcceleratedOptimizer does
        scaler.step(optimizer)
        scaler.update()
    assert _parameter(first).tolist() == _parameter(second).tolist() == [0.0] * 3
    assert scaler.get_scale() == 16.0


def test_optimizers_that_were_clipped_together_are_not_unscaled_again() -> None:
    scaler = GradScaler(init_scale=8.0)
    first, second = _optimizer(gradient=8.0), _optimizer(gradient=8.0)
    assert unscale_all(scaler, [first, second]) == {
        id(_parameter(first)): (3.0, 1.0),
        id(_parameter(second)): (3.0, 1.0),
    }
    assert unscale_all(scaler, [first, second]) == {}
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    scaler.update()
    assert _parameter(second).tolist() == [0.0] * 3


def test_an_overflow_in_the_second_optimizer_takes_the_growth_back() -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    scaler.step(_optimizer())
    scaler.update()
    scaler.step(_optimizer(gradient=math.inf))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_several_backward_passes_before_a_step_add_up_with_one_scale() -> None:
    scaler = GradScaler(init_scale=8.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):
        scaler.scale((parameter * 0.25).sum()).backward()
    assert parameter.grad.item() == 4.0  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert parameter.item() == 0.5


def test_a_step_that_the_user_leaves_out_is_forgotten_at_the_next_backward_pass() -> None:
    scaler, optimizer = GradScaler(init_scale=8.0), _optimizer()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def test_nested_outputs_are_scaled() -> None:
    scaler = GradScaler(init_scale=2.0)
    first, [second] = scaler.scale((torch.ones(1), [torch.ones(1)]))
    assert (first.item(), second.item()) == (2.0, 2.0)
    assert [tensor.item() for tensor in scaler.scale(iter([torch.ones(1)]))] == [2.0]
    with pytest.raises(InvalidArgument, match="found int"):
        scaler.scale(3)


def test_the_scale_can_be_set_and_its_rules_changed() -> None:
    scaler = GradScaler()
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaler.update(torch.tensor(16.0))
    assert scaler.get_scale() == 16.0
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(5)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 5)
    with pytest.raises(InvalidArgument, match="growth_factor"):
        scaler.set_growth_factor(0.5)


def test_a_disabled_one_leaves_everything_as_it_is() -> None:
    scaler, optimizer = GradScaler(enabled=False), _optimizer(gradient=math.inf)
    assert scaler.scale(torch.ones(1)).item() == 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert _parameter(optimizer).tolist() == [-math.inf] * 3
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    scaler.load_state_dict({})


def test_it_survives_pickling() -> None:
    scaler = GradScaler(init_scale=4.0, growth_interval=7)
    copy = pickle.loads(pickle.dumps(scaler))
    assert copy.state_dict() == scaler.state_dict()
    optimizer = _optimizer(gradient=4.0)
    copy.step(optimizer)
    assert _parameter(optimizer).tolist() == [0.0] * 3


def test_misuse_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"torch\.amp\.GradScaler elsewhere"):
        GradScaler("cuda")
    with pytest.raises(InvalidArgument, match="closure"):
        GradScaler().step(_optimizer(), lambda: None)
    with pytest.raises(RuntimeError, match="no optimizer has stepped"):
        GradScaler().update()
    with pytest.raises(InvalidArgument, match="lacks scale"):
        GradScaler().load_state_dict({})
    half = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    half.grad = torch.ones(1, dtype=torch.float16)
    with pytest.raises(InvalidArgument, match="keep the parameters in fp32"):
        GradScaler().unscale_(torch.optim.SGD([half], lr=1.0))


def test_an_optimizer_without_gradients_steps() -> None:
    scaler, optimizer = GradScaler(), _optimizer()
    _parameter(optimizer).grad = None
    scaler.step(optimizer)
    scaler.update()
    assert not overflowed(scaler, optimizer)


def test_without_a_scaler_nothing_is_unscaled() -> None:
    assert unscale_all(None, [_optimizer()]) == {}


def test_the_scaler_of_torch_is_asked_to_unscale() -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), _optimizer(gradient=8.0)
    scaler.scale(torch.ones(1))
    assert unscale_all(scaler, [optimizer]) == {}
    assert _parameter(optimizer).grad.tolist() == [2.0] * 3  # type: ignore[union-attr]
