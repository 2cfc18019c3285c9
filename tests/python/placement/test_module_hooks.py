"""Hooks of modules: when they are called, and that modules are as before without them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_hooks import (
    HookedForward,
    ModelHook,
    MoveGuard,
    SequentialHook,
    add_hook_to_module,
    guard_moves,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

CALLS: list[str] = []


class Telling(ModelHook):
    """Notes its calls, and adds its number to what passes."""

    def __init__(self, number: int, failing: bool = False) -> None:
        self.number, self.failing = number, failing

    def _tell(self, what: str) -> None:
        CALLS.append(f"{what} {self.number}")

    def init_hook(self, module: Any) -> Any:
        self._tell("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._tell("pre")
        if self.failing:
            raise RuntimeError("pre failed")
        return (args[0] + self.number, *args[1:]), {**kwargs, f"from{self.number}": self.number}

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._tell("post")
        return output * 10

    def forward_failed(self, module: nn.Module) -> None:
        self._tell("failed")

    def detach_hook(self, module: Any) -> Any:
        self._tell("detach")
        return module


class Adding(nn.Module):
    """Adds what it is called with by name."""

    def forward(self, x: torch.Tensor, **kwargs: int) -> torch.Tensor:
        """Documented."""
        if "boom" in kwargs:
            raise RuntimeError("forward failed")
        return x + sum(kwargs.values())


@pytest.fixture(autouse=True)
def _no_calls_before() -> None:
    CALLS.clear()


def calls() -> list[str]:
    found = list(CALLS)
    CALLS.clear()
    return found


def test_a_hook_that_does_nothing_changes_nothing() -> None:
    module, hook = Adding(), ModelHook()
    assert hook.init_hook(module) is module
    assert hook.pre_forward(module, 1, a=2) == ((1,), {"a": 2})
    assert hook.post_forward(module, 3) == 3
    assert hook.detach_hook(module) is module
    hook.forward_failed(module)
    assert hook.no_grad is False


def test_a_hook_is_called_before_and_after_forward() -> None:
    module = Adding()
    assert add_hook_to_module(module, Telling(1)) is module
    assert module(torch.zeros(1), a=5).tolist() == [70]
    assert calls() == ["init 1", "pre 1", "post 1"]
    assert isinstance(module.forward, HookedForward)
    assert module._old_forward(torch.zeros(1)).tolist() == [0]


def test_forward_looks_as_it_did() -> None:
    module = add_hook_to_module(Adding(), ModelHook())
    assert module.forward.__name__ == "forward"
    assert inspect.signature(module.forward) == inspect.signature(Adding().forward)
    assert inspect.unwrap(module.forward).__doc__ == "Documented."


def test_another_hook_replaces_the_first_which_is_detached() -> None:
    module = add_hook_to_module(Adding(), Telling(1))
    add_hook_to_module(module, Telling(2))
    module(torch.zeros(1))
    assert calls() == ["init 1", "detach 1", "init 2", "pre 2", "post 2"]


def test_an_appended_hook_is_called_after_the_first() -> None:
    module = add_hook_to_module(Adding(), Telling(1), append=True)
    add_hook_to_module(module, Telling(2), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert len(module._hf_hook.hooks) == 2
    CALLS.clear()
    assert module(torch.zeros(1)).tolist() == [600]
    assert calls() == ["pre 1", "pre 2", "post 1", "post 2"]
    remove_hook_from_module(module)
    assert calls() == ["detach 1", "detach 2"]


def test_several_hooks_run_without_gradients_if_one_asks_for_that() -> None:
    without = ModelHook()
    without.no_grad = True
    assert not SequentialHook(ModelHook()).no_grad
    for hook in (without, SequentialHook(ModelHook(), without)):
        module = add_hook_to_module(nn.Linear(1, 1), hook)
        assert not module(torch.ones(1)).requires_grad


def test_hooks_are_told_of_a_forward_that_failed() -> None:
    module = add_hook_to_module(Adding(), SequentialHook(Telling(1), Telling(2)))
    calls()
    with pytest.raises(RuntimeError, match="forward failed"):
        module(torch.zeros(1), boom=1)
    assert calls() == ["pre 1", "pre 2", "failed 1", "failed 2"]


def test_hooks_before_one_that_failed_are_told() -> None:
    module = add_hook_to_module(Adding(), SequentialHook(Telling(1), Telling(2, failing=True), Telling(3)))
    calls()
    with pytest.raises(RuntimeError, match="pre failed"):
        module(torch.zeros(1))
    assert calls() == ["pre 1", "pre 2", "failed 1"]


def test_without_its_hook_a_module_is_as_before() -> None:
    module = nn.Sequential(Adding(), Adding())
    before = [dict(found.__dict__) for found in module.modules()]
    for found in module.modules():
        add_hook_to_module(found, Telling(1))
    remove_hook_from_module(module)
    assert "_hf_hook" in module[0].__dict__
    remove_hook_from_module(module, recurse=True)
    assert [found.__dict__ for found in module.modules()] == before
    for found in module.modules():
        add_hook_to_module(found, Telling(1))
    remove_hook_from_submodules(module)
    assert [found.__dict__ for found in module.modules()] == before


def test_a_forward_that_was_patched_before_is_back_and_one_patched_since_too() -> None:
    module = Adding()
    module.forward = lambda x: x + 100  # type: ignore[method-assign]
    add_hook_to_module(module, ModelHook())
    remove_hook_from_module(module)
    assert module(torch.zeros(1)).tolist() == [100]
    add_hook_to_module(module, ModelHook())
    module._old_forward = lambda x: x + 200
    assert module(torch.zeros(1)).tolist() == [200]
    remove_hook_from_module(module)
    assert module(torch.zeros(1)).tolist() == [200]


def test_what_stands_around_the_hooked_forward_goes_on_working_without_the_hook() -> None:
    module = add_hook_to_module(Adding(), Telling(1))
    hooked = module.forward
    module.forward = lambda x: hooked(x) + 1  # type: ignore[method-assign]
    remove_hook_from_module(module)
    assert module(torch.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_have_hooks_of_their_own(clone: Any) -> None:
    module = add_hook_to_module(nn.Linear(1, 1), Telling(1))
    copied = clone(module)
    with torch.no_grad():
        copied.weight.fill_(0)
        copied.bias.fill_(7)
    assert copied.forward._module is copied
    assert copied.forward.inner.__self__ is copied
    remove_hook_from_module(copied)
    assert copied(torch.ones(1)).tolist() == [7]
    assert "_hf_hook" in module.__dict__


def test_a_graph_that_is_changed_after_its_hook_was_removed_runs_as_changed() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    before = graph(x)
    add_hook_to_module(graph, ModelHook())
    assert torch.equal(graph(x), before)
    remove_hook_from_module(graph, recurse=True)
    *_, last = graph.graph.nodes
    with graph.graph.inserting_before(last):
        last.args = (graph.graph.call_function(torch.zeros_like, last.args),)
    graph.recompile()
    assert not graph(x).any()


def test_a_guarded_model_is_moved_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    guard_moves(model)
    assert isinstance(model.to, MoveGuard)
    assert model.to(torch.float16) is model
    assert model[0].weight.dtype is torch.float16
    assert "Sequential.to: a device map" in caplog.text


@pytest.mark.parametrize("method", ["to", "cuda", "cpu"])
def test_a_guarded_model_with_offloaded_weights_is_not_moved(method: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    guard_moves(model)
    copied = copy.deepcopy(model)
    copied[1] = nn.Linear(1, 1)
    with pytest.raises(InvalidArgument, match=rf"Sequential\.{method}: '1\.weight' is offloaded"):
        getattr(model, method)("cpu")
    assert copied.to("cpu") is copied
    remove_hook_from_module(model)
    assert "to" not in model.__dict__
