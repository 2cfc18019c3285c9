"""Bringing tensors that are elsewhere, and releasing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.offloaded_tensors import Repeatable, bring, release, slots_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_parameter("absent", None)
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("saved", torch.ones(3))
        self.register_buffer("other", torch.ones(3), persistent=False)


def away() -> tuple[Model, dict[str, torch.Tensor]]:
    model = Model()
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return model.to_empty(device="meta"), {
        name: tensor.detach().clone() for name, tensor in Model().state_dict().items()
    } | {"scale": nn.Parameter(torch.full(state["scale"].shape, 2.0))}


def test_slots_are_parameters_and_if_asked_for_saved_buffers_and_those_of_submodules() -> None:
    names = {
        (buffers, recurse): [slot.name for slot in slots_of(Model(), buffers, recurse)]
        for buffers in (False, True)
        for recurse in (False, True)
    }
    assert names[False, False] == ["scale"]
    assert names[True, False] == ["scale", "saved"]
    assert names[False, True] == ["scale", "inner.weight", "inner.bias"]
    assert len(names[True, True]) == 7


def test_what_is_brought_is_released_to_the_very_objects_that_were_there() -> None:
    model, weights = away()
    before = dict(model.named_parameters())
    brought = bring(slots_of(model, True, True), weights, "cpu")
    assert model.scale is weights["scale"]
    assert model.inner.running_var.tolist() == [1, 1]
    assert isinstance(model.inner.weight, nn.Parameter)
    assert model.other.device.type == "meta"
    release(brought)
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == {
        name: id(tensor) for name, tensor in before.items()
    }
    assert model.inner.running_var.device.type == "meta"


def test_tensors_that_are_there_are_left_alone() -> None:
    model, weights = away()
    model.scale = nn.Parameter(torch.zeros(2))
    brought = bring(slots_of(model, False, True), weights, "cpu")
    assert model.scale.tolist() == [0, 0]
    release(brought)
    assert model.scale.tolist() == [0, 0]


def test_values_are_converted_to_the_dtype_and_training_of_the_module() -> None:
    model, weights = away()
    model.half()
    model.scale.requires_grad_(False)
    bring(slots_of(model, False, False), weights, None)
    assert (model.scale.dtype, model.scale.requires_grad) == (torch.float16, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("inner.bias"), r"'inner\.bias' is offloaded, but there are no weights"),
        (
            lambda weights: weights.update({"inner.bias": torch.ones(9)}),
            r"'inner\.bias' has the shape \(2,\); .* \(9,\)",
        ),
    ],
)
def test_what_cannot_be_brought_leaves_everything_away(change: Any, message: str) -> None:
    model, weights = away()
    change(weights)
    with pytest.raises(InvalidArgument, match=message):
        bring(slots_of(model, False, True), weights, "cpu")
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_a_shared_tensor_is_copied_once_and_only_for_the_time() -> None:
    value = torch.ones(2, dtype=torch.float64)
    copies: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    outer, inner = (nn.Module(), nn.Module())
    for module in (outer, inner):
        module.w = nn.Parameter(torch.empty(2, device="meta"))
    first = bring(slots_of(outer, False, False), {"w": value}, "cpu", copies)
    second = bring(slots_of(inner, False, False), {"w": value}, "cpu", copies)
    assert outer.w is inner.w
    release(second, copies)
    assert copies[value.data_ptr()]
    release(first, copies)
    assert not copies[value.data_ptr()]


class Pair(nn.Module):
    """Two parameters, the second of which no weights are kept for at first."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(2, device="meta"), requires_grad=trains)
        self.second = nn.Parameter(torch.zeros(2), requires_grad=trains)


def brought_once(module: nn.Module, weights: dict[str, torch.Tensor]) -> Repeatable | None:
    brought = bring(slots_of(module, False, False), weights, "cpu")
    repeatable = Repeatable.of(module, brought, weights, "cpu")
    release(brought)
    return repeatable


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_what_needs_no_copy_is_put_there_again(kind: type) -> None:
    module = Pair()
    weights = {"first": torch.ones(2)}
    if kind is nn.Parameter:
        weights["first"] = nn.Parameter(weights["first"], requires_grad=False)
    away = module.first
    repeatable = brought_once(module, weights)
    assert repeatable is not None
    for _ in range(2):
        brought = repeatable.bring(module, weights, "cpu")
        assert brought is not None
        assert module.first.data_ptr() == weights["first"].data_ptr()
        assert isinstance(module.first, nn.Parameter)
        release(brought)
        assert module.first is away


@pytest.mark.parametrize(
    "change", ["the weight", "the parameter", "another parameter", "one more", "training", "the device", "the module"]
)
def test_it_is_not_where_something_has_changed(change: str) -> None:
    module, other = Pair(), Pair()
    weights = {"first": torch.ones(2), "second": torch.ones(2)}
    repeatable = brought_once(module, weights)
    assert repeatable is not None
    device = "cpu"
    if change == "the weight":
        weights["first"] = torch.zeros(2)
    elif change == "the parameter":
        module.first = nn.Parameter(torch.empty(2, device="meta", dtype=torch.float16), requires_grad=False)
    elif change == "another parameter":
        module.second = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    elif change == "one more":
        module.third = nn.Parameter(torch.empty(2, device="meta"))
    elif change == "training":
        module.first.requires_grad_()
    elif change == "the device":
        device = "meta"
    before = dict(module._parameters)
    assert repeatable.bring(other if change == "the module" else module, weights, device) is None
    assert all(module._parameters[name] is tensor for name, tensor in before.items())


def test_what_is_converted_or_gets_a_gradient_is_made_anew() -> None:
    assert brought_once(Pair(), {"first": torch.ones(2, dtype=torch.float16)}) is None
    assert brought_once(Pair(trains=True), {"first": torch.ones(2)}) is None
    assert brought_once(Pair(trains=True), {"first": nn.Parameter(torch.ones(2))}) is not None


def test_copies_that_were_made_are_taken_if_they_are_what_is_wanted() -> None:
    module = Pair()
    weights = {"first": torch.ones(2)}
    made = torch.full((2,), 5.0)
    for copies, expected in (({"first": made}, 5), ({"first": made.half()}, 1), ({"first": made.to("meta")}, 1)):
        brought = bring(slots_of(module, False, False), weights, "cpu", None, copies)
        assert module.first.tolist() == [expected] * 2
        release(brought)
