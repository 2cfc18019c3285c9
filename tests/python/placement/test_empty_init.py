"""Modules that are built without values."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.empty_init import init_empty_weights, init_on_device
from accelerate_cpp.placement.tied_parameters import find_tied_parameters


class Model(nn.Module):
    """A layer, a shared weight, a frozen one, buffers and a lazy layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        fresh = nn.Parameter(torch.ones(3), requires_grad=False)
        fresh.tag = 5  # type: ignore[attr-defined]
        self.a, self.b = fresh, fresh
        self.lazy = nn.LazyLinear(2)
        self.register_parameter("absent", None)


def test_parameters_have_no_values_and_buffers_do() -> None:
    with init_empty_weights():
        model = Model()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.norm.running_mean.tolist() == [0, 0]
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_what_is_shared_stays_so_and_attributes_are_kept() -> None:
    with init_empty_weights():
        model = Model()
    assert find_tied_parameters(model) == [["first.weight", "second.weight"], ["a", "b"]] or find_tied_parameters(
        model
    ) == [["a", "b"], ["first.weight", "second.weight"]]
    assert (model.a.tag, model.a.requires_grad) == (5, False)


def test_lazy_layers_get_their_shape_without_values() -> None:
    with init_empty_weights():
        layer = nn.LazyLinear(2)
    layer.initialize_parameters(torch.ones(1, 3))
    assert (layer.weight.device.type, tuple(layer.weight.shape)) == ("meta", (2, 3))


@pytest.mark.parametrize("said", ["argument", "variable"])
def test_buffers_can_be_left_out_too(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1" if said == "variable" else "0")
    with init_empty_weights(include_buffers=True if said == "argument" else None):
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("given", torch.ones(2, device="cpu"))
        assert torch.ones(1).device.type == "meta"
    assert {tensor.device.type for tensor in [*norm.parameters(), *norm.buffers()]} == {"meta"}
    with init_empty_weights(include_buffers=False):
        assert nn.BatchNorm1d(2).running_mean.device.type == "cpu"


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), init_empty_weights(include_buffers=True):
        raise KeyError
    assert nn.BatchNorm1d(1).running_mean.device.type == "cpu"


def test_the_innermost_device_decides() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(1, 1)
        outer = nn.Linear(1, 1)
    assert (inner.weight.device.type, outer.weight.device.type) == ("cpu", "meta")


def test_other_threads_build_as_they_did() -> None:
    built: list[nn.Linear] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert built[0].weight.device.type == "cpu"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="device 99"), init_on_device(99):
        pass
