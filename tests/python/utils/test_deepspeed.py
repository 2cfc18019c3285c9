"""What programs that train through DeepSpeed import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import accelerate.utils.deepspeed as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.scheduler import AcceleratedScheduler
from accelerate_cpp.utils import compile_regions_deepspeed, deepspeed


class Engine:
    """Notes what is called."""

    def __init__(self, norm: Any = None) -> None:
        self.calls: list[Any] = []
        self.norm = norm

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(("boundary", is_boundary))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", loss, kwargs))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> Any:
        return self.norm


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize("call", [{}, {"sync_gradients": False}, {"retain_graph": True}], ids=str)
def test_an_engine_is_called_as_the_original_calls_it(call: dict[str, Any]) -> None:
    own, theirs = Engine(), Engine()
    deepspeed.DeepSpeedEngineWrapper(own).backward(1, **call)
    original.DeepSpeedEngineWrapper(theirs).backward(1, **call)
    assert own.calls == theirs.calls
    assert ("step" in own.calls) is call.get("sync_gradients", True)


@pytest.mark.parametrize(("norm", "expected"), [(torch.tensor(3.0), 3.0), (2.5, 2.5), (None, None)])
def test_the_norm_of_gradients_is_a_number_if_there_is_one(norm: Any, expected: float | None) -> None:
    assert deepspeed.DeepSpeedEngineWrapper(Engine(norm)).get_global_grad_norm() == expected


def test_an_optimizer_is_left_to_its_engine() -> None:
    inner = optimizer()
    wrapped = deepspeed.DeepSpeedOptimizerWrapper(inner)
    parameter = inner.param_groups[0]["params"][0]
    parameter.grad = torch.ones(1)
    wrapped.step()
    wrapped.zero_grad()
    assert (parameter.item(), parameter.grad.item()) == (1.0, 1.0)
    assert isinstance(wrapped, AcceleratedOptimizer)
    assert not wrapped.step_was_skipped
    inner.overflow = True  # type: ignore[attr-defined]
    assert wrapped.step_was_skipped


def test_a_schedule_is_left_to_its_engine() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer(), 1)
    wrapped = deepspeed.DeepSpeedSchedulerWrapper(schedule, schedule.optimizer)
    before = schedule.last_epoch
    wrapped.step()
    assert schedule.last_epoch == before
    assert isinstance(wrapped, AcceleratedScheduler)
    assert wrapped.get_last_lr() == [1.0]


def test_stand_ins_hold_what_they_are_given() -> None:
    own, theirs = (module.DummyOptim([1], lr=2, foo=3) for module in (deepspeed, original))
    assert vars(own) == vars(theirs)
    assert vars(deepspeed.DummyOptim([1])) == vars(original.DummyOptim([1]))
    schedules = [module.DummyScheduler(own, 10, 2, len, foo=3) for module in (deepspeed, original)]
    assert vars(schedules[0]) == vars(schedules[1])
    assert vars(deepspeed.DummyScheduler(own)) == vars(original.DummyScheduler(own))


def test_the_selected_plugin_is_found() -> None:
    plugins = {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}
    plugins["b"]._selected = True
    assert deepspeed.get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=plugins)) is plugins["b"]


def test_one_plugin_alone_and_the_first_of_several_need_not_be_selected() -> None:
    plugin, other = DeepSpeedPlugin(), DeepSpeedPlugin()
    assert deepspeed.get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=plugin)) is plugin
    both = {"a": plugin, "b": other}
    assert deepspeed.get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=both)) is plugin


@pytest.mark.parametrize("plugins", [None, {}], ids=["none", "empty"])
def test_without_a_plugin_there_is_none(plugins: Any) -> None:
    with pytest.raises(InvalidArgument, match="does not use DeepSpeed"):
        deepspeed.get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=plugins))


def test_optimizers_that_deepspeed_has_no_form_of_are_told() -> None:
    model = torch.nn.Linear(2, 1)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.AdamW(model.parameters(), amsgrad=True),
        torch.optim.Adagrad(model.parameters(), lr_decay=0.1),
    ):
        message = f"no optimizer for the host that steps as this {type(optimizer).__name__}"
        with pytest.raises(InvalidArgument, match=message):
            deepspeed.map_pytorch_optim_to_deepspeed(optimizer)


def test_blocks_are_compiled_in_place() -> None:
    model = torch.nn.Sequential()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    model.head = torch.nn.Linear(2, 1)
    compile_regions_deepspeed(model, backend="eager")
    compiled = [one for one in model.modules() if one._compiled_call_impl is not None]
    assert compiled == [*model.blocks, model.head]
