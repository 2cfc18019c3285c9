"""The optimizer wrapper."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer as OriginalOptimizer

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
from accelerate_cpp.precision.grad_scaler import GradScaler
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation


@pytest.fixture(autouse=True)
def accumulation(monkeypatch):
    """A fresh state of accumulation for each test."""
    monkeypatch.setattr(current, "accumulation", Accumulation())
    return current.accumulation


@pytest.fixture
def parameter():
    """One weight of 1 with a gradient of 1."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return weight


@pytest.mark.parametrize("name", ["__init__", "step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_signatures_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(AcceleratedOptimizer, name)) == shape(getattr(OriginalOptimizer, name))


def test_nothing_happens_while_gradients_accumulate(accumulation, parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    accumulation.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert (parameter.item(), parameter.grad.item()) == (1.0, 1.0)
    accumulation.sync_gradients = True
    optimizer.step()
    optimizer.zero_grad()
    assert (parameter.item(), parameter.grad) == (0.0, None)


def test_zero_grad_can_keep_the_gradient(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.item() == 0.0


def test_an_optimizer_without_set_to_none_is_called_without_it(parameter):
    class Plain(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    optimizer = AcceleratedOptimizer(Plain([parameter], lr=1.0))
    optimizer.zero_grad()
    assert parameter.grad.item() == 0.0
    with pytest.raises(InvalidArgument, match="zero_grad of Plain takes no set_to_none"):
        optimizer.zero_grad(set_to_none=True)


def test_a_closure_is_evaluated_and_its_loss_returned(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    assert optimizer.step(lambda: 3.5) == 3.5


def test_everything_else_is_the_wrapped_optimizers(parameter):
    inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    inner.of_its_own = 7
    optimizer = AcceleratedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.of_its_own == 7
    assert optimizer.step_was_skipped is False
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert inner.param_groups[1]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(AttributeError, match="no_such"):
        optimizer.no_such  # noqa: B018


def test_hooks_reach_the_wrapped_optimizer(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer.step()
    assert calls == ["stepped"]


def test_it_pickles_with_its_state(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0, momentum=0.9))
    optimizer.step()
    restored = pickle.loads(pickle.dumps(optimizer))
    (state,) = restored.state.values()
    assert state["momentum_buffer"].item() == 1.0


def test_state_follows_parameters_that_were_moved(parameter):
    inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    inner.step()
    parameter.grad = None
    parameter.data = parameter.data.double()
    assert (
        AcceleratedOptimizer(inner, device_placement=False).state[parameter]["momentum_buffer"].dtype == torch.float32
    )
    assert AcceleratedOptimizer(inner).state[parameter]["momentum_buffer"].dtype == torch.float64


@pytest.mark.parametrize(
    "scaler",
    [
        GradScaler,
        lambda **options: torch.amp.GradScaler("cpu", **options),
        lambda **options: DeviceGradScaler("cpu", **options),
    ],
)
def test_a_scaler_unscales_and_skips(parameter, scaler):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=scaler(init_scale=4.0))
    optimizer.scaler.scale(torch.ones(1))
    parameter.grad.fill_(2.0)
    optimizer.step()
    assert (parameter.item(), optimizer.step_was_skipped) == (0.5, False)
    optimizer.scaler.scale(torch.ones(1))
    parameter.grad.fill_(float("inf"))
    optimizer.step()
    assert (parameter.item(), optimizer.step_was_skipped) == (0.5, True)
    assert optimizer.scaler.get_scale() == 2.0


def test_a_disabled_scaler_leaves_gradients_alone(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=GradScaler(enabled=False))
    assert optimizer.step(lambda: 3.5) == 3.5
    assert parameter.item() == 0.0


def test_modes_reach_optimizers_that_have_them(parameter):
    class ScheduleFree(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    inner = ScheduleFree([parameter], lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    optimizer.train()
    assert inner.mode == "train"
    optimizer.eval()
    assert inner.mode == "eval"
    plain = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    plain.train()
    plain.eval()


def test_attributes_of_the_wrapped_optimizer_are_read_and_set_through_the_wrapper(parameter):
    class Counting(torch.optim.SGD):
        counted = 0

    inner = Counting([parameter], lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    optimizer.counted = 5
    optimizer.param_groups = [{**inner.param_groups[0], "lr": 0.25}]
    optimizer.state = {parameter: {"momentum_buffer": None}}
    optimizer.defaults = {"lr": 3.0}
    optimizer.mine = "wrapper's"
    assert (inner.counted, optimizer.counted) == (5, 5)
    assert (inner.param_groups[0]["lr"], inner.state, inner.defaults) == (
        0.25,
        {parameter: {"momentum_buffer": None}},
        {"lr": 3.0},
    )
    assert not hasattr(inner, "mine")
    assert (isinstance(optimizer, torch.optim.Optimizer), optimizer.optimizer) == (True, inner)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = optimizer.nowhere


def test_parameters_that_are_added_are_stepped(parameter):
    optimizer, added = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0)), torch.nn.Parameter(torch.ones(1))
    added.grad = torch.ones(1)
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    optimizer.step()
    assert (parameter.item(), added.item()) == (0.0, 0.5)


def test_hooks_that_are_registered_on_the_wrapper_run_in_its_step(parameter):
    optimizer, ran = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0)), []
    before = optimizer.register_step_pre_hook(lambda *_: ran.append(("before", parameter.item())))
    optimizer.register_step_post_hook(lambda *_: ran.append(("after", parameter.item())))
    optimizer.register_state_dict_post_hook(lambda _, state: ran.append("saved"))
    optimizer.step()
    before.remove()
    optimizer.state_dict()
    assert ran == [("before", 1.0), ("after", 0.0), "saved"]


def test_a_scheduler_made_for_the_wrapper_sees_its_steps_and_can_be_pickled_with_it(parameter, recwarn):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0, momentum=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    schedule.step()
    assert (optimizer.param_groups[0]["lr"], optimizer.optimizer.param_groups[0]["lr"]) == (0.5, 0.5)
    assert [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)] == []
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert repr(copied) == repr(optimizer)
    copied.step()
    assert parameter.item() == 0.0


def test_the_states_of_the_run_are_at_hand(parameter, accumulation):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    accumulation.sync_gradients = False
    assert optimizer.gradient_state.sync_gradients is False
    assert optimizer.accelerator_state.num_processes == 1


def test_a_program_can_say_that_the_last_step_was_left_out(parameter):
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5))
    for value in (True, False):
        optimizer._is_overflow = value
        assert optimizer.step_was_skipped is value
    assert optimizer._accelerate_step_called is False
    optimizer._accelerate_step_called = True
    assert optimizer._accelerate_step_called is True
    assert not hasattr(optimizer.optimizer, "_accelerate_step_called")
