"""One loading of a checkpoint: checks first, then tensor after tensor, and nothing half-loaded after an error."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.placement.checkpoint_placing import Loading
from accelerate_cpp.placement.empty_init import init_empty_weights
from accelerate_cpp.placement.offload import FolderWriter, read_offload_index
from accelerate_cpp.placement.tied_parameters import find_tied_parameters


class File:
    """A file of a checkpoint in memory, which can fail to read a tensor, and notes what of it is alive meanwhile."""

    def __init__(self, tensors: dict[str, Any], failing: str = "") -> None:
        self.tensors, self.failing = tensors, failing
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        value = self.tensors[name]
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def read(self, name: str) -> Any:
        self.alive.append(sum(reference() is not None for reference in self.given))
        if name == self.failing:
            raise CheckpointError(f"{name} cannot be read")
        value = self.tensors[name]
        if not isinstance(value, torch.Tensor):
            return value
        copied = value.clone()
        self.given.append(weakref.ref(copied))
        return copied


class Model(nn.Module):
    """A norm with buffers, a layer, and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.head = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.head.weight = self.layer.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)


def empty(include_buffers: bool = False) -> Model:
    with init_empty_weights(include_buffers=include_buffers):
        return Model()


def state(lacking: str = "head.weight") -> dict[str, Any]:
    return {name: tensor for name, tensor in Model().state_dict().items() if name != lacking}


def loading(model: nn.Module, device_map: Any = None, dtype: Any = None, **options: Any) -> Loading:
    return Loading(
        model,
        find_tied_parameters(model),
        device_map,
        dtype,
        options.get("in_fp32", ()),
        options.get("offload_buffers", False),
    )


def devices(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}


def test_only_one_tensor_is_held_at_a_time() -> None:
    file = File({f"{index}.weight": torch.ones(4, 4) for index in range(8)})
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
    run = loading(model, {"": "cpu"}, torch.float16)
    assert run.check([file], strict=True) == []
    run.load([file], None)
    assert set(file.alive) == {0}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_a_shared_parameter_needs_one_of_its_names_and_stays_shared() -> None:
    for lacking in ("head.weight", "layer.weight", ""):
        model, content = empty(), state(lacking)
        run = loading(model, {"": "cpu"})
        run.check([File(content)], strict=True)
        run.load([File(content)], None)
        assert model.head.weight is model.layer.weight
        assert not run.empty


def test_parameters_that_have_values_are_filled_in_place() -> None:
    model, content = Model(), state()
    weight = model.layer.weight
    run = loading(model)
    run.check([File(content)], strict=True)
    run.load([File(content)], None)
    assert model.layer.weight is weight
    assert weight.tolist() == content["layer.weight"].tolist()


def test_tensors_get_the_dtype_of_the_model_or_the_one_that_is_asked_for() -> None:
    content = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state().items()}
    for dtype, expected in ((None, torch.float32), (torch.float16, torch.float16)):
        for model in (empty(), Model()):
            run = loading(model, None, dtype, in_fp32=["norm"])
            run.check([File(content)], strict=True)
            run.load([File(content)], None)
            assert model.layer.bias.dtype is expected
            assert model.norm.weight.dtype is torch.float32
            assert model.norm.num_batches_tracked.dtype is torch.int64


def test_names_of_modules_in_fp32_are_whole() -> None:
    model = nn.ModuleDict({"wo": nn.Linear(1, 1), "two": nn.Linear(1, 1)})
    content = dict(model.state_dict())
    run = loading(model, None, torch.float16, in_fp32=["wo"])
    run.check([File(content)], strict=True)
    run.load([File(content)], None)
    assert (model["wo"].weight.dtype, model["two"].weight.dtype) == (torch.float32, torch.float16)


def test_the_disk_gets_weights_in_the_right_dtype_and_shared_ones_under_each_name(tmp_path: Path) -> None:
    model, content = empty(), state()
    run = loading(model, {"norm": "disk", "layer": "disk", "head": "disk"}, torch.float16)
    run.check([File(content)], strict=True)
    with FolderWriter(tmp_path) as writer:
        run.load([File(content)], writer)
    index = read_offload_index(tmp_path)
    assert sorted(index) == ["head.weight", "layer.bias", "layer.weight", "norm.bias", "norm.weight"]
    assert {entry["dtype"] for entry in index.values()} == {"float16"}
    assert (model.layer.weight.device.type, model.layer.weight.dtype) == ("meta", torch.float16)
    assert model.head.weight is model.layer.weight
    assert model.norm.running_mean.device.type == "cpu"
    assert run.empty == []


def test_buffers_go_to_the_disk_if_asked_for(tmp_path: Path) -> None:
    model = empty(include_buffers=True)
    run = loading(model, {"": "disk"}, offload_buffers=True)
    run.check([File(state())], strict=True)
    with FolderWriter(tmp_path) as writer:
        run.load([File(state())], writer)
    assert "norm.num_batches_tracked" in read_offload_index(tmp_path)
    assert run.empty == ["cache"]


@pytest.mark.parametrize(
    ("change", "strict", "message"),
    [
        ({"norm.bias": None}, True, r"strict=True: the checkpoint lacks norm\.bias; its additional entries: nothing"),
        ({"zz": torch.ones(1)}, True, r"lacks nothing; its additional entries: zz; .*Model seems to be another one"),
        (
            {"norm.bias": torch.ones(7), "layer.bias": torch.ones(1)},
            False,
            r"norm\.bias has \(3,\), .* \(7,\), layer\.bias",
        ),
        ({"norm.bias": 5}, False, r"norm\.bias has \(3,\), in the checkpoint None"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_changed(
    change: dict[str, Any], strict: bool, message: str
) -> None:
    content = {name: value for name, value in {**state(), **change}.items() if value is not None}
    model = empty()
    with pytest.raises(InvalidArgument, match=message):
        loading(model, {"": "cpu"}).check([File(content)], strict)
    assert devices(model) == devices(empty())


def test_what_has_no_place_is_told_and_left_out() -> None:
    model = empty()
    file = File({**state("norm.bias"), "zz": torch.ones(1), "cache": torch.zeros(3)})
    run = loading(model, {"": "cpu"})
    assert run.check([file], strict=False) == ["zz", "cache"]
    run.load([file], None)
    assert run.empty == ["norm.bias"]
    assert model.cache.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"norm": "cpu", "head": "cpu"}, r"no device to layer\.weight, layer\.bias"),
        ({"": 99}, "device 99"),
    ],
)
def test_a_map_must_name_devices_that_are_there_for_all(device_map: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loading(empty(), device_map).check([File(state())], strict=False)


def test_after_an_error_nothing_is_half_loaded() -> None:
    model = empty(include_buffers=True)
    before = [id(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    file = File(state(), failing="layer.bias")
    run = loading(model, {"": "cpu"})
    run.check([file], strict=True)
    with pytest.raises(CheckpointError):
        run.load([file], None)
    assert set(devices(model).values()) == {"meta"}
    assert [id(tensor) for tensor in [*model.parameters(), *model.buffers()]] == before


def test_a_device_without_room_is_named_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, content = empty(), state()
    original = torch.Tensor.to

    def full(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.shape == (3, 3) and options.get("dtype") is torch.float16:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 18 bytes")
        return original(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", full)
    run = loading(model, {"": "cpu"}, torch.float16)
    run.check([File(content)], strict=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"no room on cpu for 'layer\.weight' of \(3, 3\), 36 bytes"):
        run.load([File(content)], None)
    assert model.norm.weight.device.type == "meta"


def test_other_errors_of_moving_are_not_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    run = loading(empty(), {"": "cpu"})
    run.check([File(state())], strict=True)
    monkeypatch.setattr(torch.Tensor, "to", broken)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        run.load([File(state())], None)


def test_what_modules_save_besides_tensors_is_given_back() -> None:
    class Counting(nn.Linear):
        steps = 0

        def get_extra_state(self) -> Any:
            return {"steps": 5}

        def set_extra_state(self, saved: Any) -> None:
            self.steps = saved["steps"]

    model = nn.Sequential(Counting(1, 1))
    content = dict(model.state_dict())
    assert "0._extra_state" in content
    run = loading(model)
    assert run.check([File(content)], strict=True) == []
    run.load([File(content)], None)
    assert model[0].steps == 5
    with pytest.raises(InvalidArgument, match=r"lacks 0\._extra_state"):
        loading(model).check([File({k: v for k, v in content.items() if "extra" not in k})], strict=True)
