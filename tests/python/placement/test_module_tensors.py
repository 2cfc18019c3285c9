"""Tensors of modules: listing, moving and replacing them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import accelerate.utils as original
import accelerate.utils.modeling as original_modeling
import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement import module_tensors
from accelerate_cpp.placement.module_tensors import (
    as_device,
    as_dtype,
    dtype_byte_size,
    get_non_persistent_buffers,
    id_tensor_storage,
    is_meta,
    listed,
    named_module_tensors,
    placed_parameter,
    set_module_tensor_to_device,
    slot_of,
    walk,
)
from accelerate_cpp.plugins.enums import CustomDtype


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def model() -> nn.Sequential:
    return nn.Sequential(Inner(), nn.Linear(2, 2))


DTYPES: list[Any] = [
    *(torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2),
    *("float16", "torch.int64", "int4"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_an_element_are_those_of_the_original(dtype: Any) -> None:
    assert dtype_byte_size(dtype) == original.dtype_byte_size(dtype)


@pytest.mark.parametrize("name", ["FP8", "INT4", "INT2"])
def test_dtypes_that_torch_lacks_have_a_size(name: str) -> None:
    assert dtype_byte_size(CustomDtype[name]) == original.dtype_byte_size(original.CustomDtype[name])


def test_what_is_no_dtype_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="dtype='float'"):
        dtype_byte_size("float")
    with pytest.raises(InvalidArgument, match="dtype='nn'"):
        as_dtype("nn")


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "torch.float16"])
def test_dtypes_have_names(dtype: Any) -> None:
    assert as_dtype(dtype) is torch.float16
    assert as_dtype(None) is None


def test_devices_that_are_present_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tensors, "available_accelerators", lambda: [("cuda", 2)])
    assert [str(as_device(device)) for device in (1, "cuda:0", "cpu", torch.device("meta"), "cuda")] == [
        *("cuda:1", "cuda:0", "cpu", "meta", "cuda")
    ]
    monkeypatch.setattr(module_tensors, "available_accelerators", lambda: [("mps", 1)])
    assert str(as_device(0)) == "mps"


@pytest.mark.parametrize("device", [0, 7, -1, "cuda:3", "mps"])
def test_devices_that_are_not_present_are_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tensors, "available_accelerators", list)
    with pytest.raises(InvalidArgument, match=r"is not present; this process sees cpu$"):
        as_device(device)


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'disk': torch knows no such device"):
        as_device("disk")


def test_tensors_in_the_same_memory_have_the_same_storage_id() -> None:
    whole = torch.zeros(4)
    assert id_tensor_storage(whole) == id_tensor_storage(whole[2:]) == original.id_tensor_storage(whole)
    assert id_tensor_storage(whole) != id_tensor_storage(whole.clone())


def test_of_a_tensor_of_several_processes_it_is_the_own_part() -> None:
    part = torch.zeros(4)
    spread = type("Spread", (), {"to_local": lambda self: part})()
    assert id_tensor_storage(spread) == id_tensor_storage(part)


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("fqns", [False, True])
def test_buffers_that_are_not_saved_are_named_as_by_the_original(recurse: bool, fqns: bool) -> None:
    for module in (model(), Inner()):
        expected = original_modeling.get_non_persistent_buffers(module, recurse, fqns)
        assert get_non_persistent_buffers(module, recurse, fqns) == expected - {".cache"}  # a name that nothing has


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_tensors_are_listed_as_by_the_original(recurse: bool, include_buffers: bool) -> None:
    for module in (model(), Inner()):
        found = list(named_module_tensors(module, include_buffers, recurse))
        expected = original.named_module_tensors(module, include_buffers, recurse)
        assert [(name, id(tensor)) for name, tensor in found] == [(name, id(tensor)) for name, tensor in expected]


def test_buffers_that_are_not_saved_can_be_left_out_of_submodules_too() -> None:
    names = [name for name, _ in named_module_tensors(model(), recurse=True, remove_non_persistent=True)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "0.count"]


def test_a_walk_meets_modules_under_all_their_names_and_outer_ones_first() -> None:
    outer = model()
    outer.append(outer[1])
    outer[0].inner = nn.ReLU()
    assert [prefix for prefix, _ in walk(outer)] == ["", "0.", "0.inner.", "1.", "2."]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0.nope", r"'0\.nope': Inner has no parameter or buffer 'nope'; it has 'weight', 'bias', 'absent', 'count'"),
        ("3.weight", r"Sequential has no module '3'; it has '0', '1'"),
        ("0.weight.x", r"Inner has no module 'weight'; it has none"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        slot_of(model(), name)


def test_a_slot_is_a_module_and_a_name() -> None:
    outer = model()
    assert slot_of(outer, "0.count") == (outer[0], "count")


def test_a_placed_parameter_keeps_class_attributes_and_whether_it_trains() -> None:
    class Special(nn.Parameter): ...

    for kind in (nn.Parameter, Special):
        old = kind(torch.zeros(2))
        old.tag = 3  # type: ignore[attr-defined]
        value = torch.ones(2, dtype=torch.float16)
        new = placed_parameter(old, value)
        assert (type(new), new.tag, new.requires_grad, new.dtype) == (kind, 3, True, torch.float16)  # type: ignore[attr-defined]
        assert new.data_ptr() == value.data_ptr()
    assert not placed_parameter(old, torch.ones(2, dtype=torch.int8)).requires_grad


def test_a_value_takes_the_place_of_a_parameter_without_being_copied() -> None:
    module = model()
    value = torch.full((2, 3), 7.0)
    set_module_tensor_to_device(module, "0.weight", "cpu", value=value)
    assert isinstance(module[0].weight, nn.Parameter)
    assert (module[0].weight.data_ptr(), module[0].weight.requires_grad) == (value.data_ptr(), True)
    set_module_tensor_to_device(module, "0.bias", "cpu", value=torch.zeros(2))
    assert not module[0].bias.requires_grad


VALUES: list[tuple[str, Any, Any]] = [
    ("0.weight", torch.ones(2, 3, dtype=torch.float16), None),
    ("0.weight", torch.ones(2, 3, dtype=torch.float16), torch.float16),
    ("0.weight", torch.ones(2, 3, dtype=torch.float64), "bfloat16"),
    ("0.count", torch.tensor(3.5), None),
    ("0.count", torch.tensor(3.5), torch.float16),
    ("0.count", torch.tensor(5, dtype=torch.int32), torch.float16),
]


@pytest.mark.parametrize(("name", "value", "dtype"), VALUES)
def test_values_are_converted_as_by_the_original(name: str, value: torch.Tensor, dtype: Any) -> None:
    module, expected = model(), model()
    set_module_tensor_to_device(module, name, "cpu", value=value, dtype=dtype)
    original.set_module_tensor_to_device(expected, name, "cpu", value=value, dtype=as_dtype(dtype))
    found, other = (attrgetter(name)(outer) for outer in (module, expected))
    assert (type(found), found.dtype, found.tolist()) == (type(other), other.dtype, other.tolist())


def test_a_tensor_can_be_moved_and_converted_without_a_value() -> None:
    module = model()
    weight = module[0].weight
    set_module_tensor_to_device(module, "0.weight", "cpu")
    assert module[0].weight is weight
    set_module_tensor_to_device(module, "0.weight", "cpu", dtype=torch.float16)
    assert module[0].weight.dtype is torch.float16
    set_module_tensor_to_device(module, "0.weight", "meta", dtype="bfloat16")
    assert (is_meta(module[0].weight), module[0].weight.dtype) == (True, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "1.weight",
            {"value": torch.ones(3)},
            r"tensor of shape .*3.* \(which has shape .*2, 2.*\), this looks incor",
        ),
        ("1.weight", {"value": [[1.0]]}, "expected a tensor as its value, found a list"),
        ("1.nope", {}, "has no parameter or buffer 'nope'"),
        ("0.absent", {}, "is None and has nothing to move"),
        ("1.bias", {}, "on the meta device and has no values: pass the value to put on cpu"),
        ("1.weight", {"dtype": "nope"}, "expected a torch.dtype"),
    ],
)
def test_what_cannot_be_put_there_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    module = model()
    module[1].bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=message):
        set_module_tensor_to_device(module, name, "cpu", **arguments)


def test_statistics_of_eight_bit_weights_stay_with_them() -> None:
    module = nn.Linear(2, 2)
    statistics = torch.ones(2)
    set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(2, 2), fp16_statistics=statistics)
    assert torch.equal(module.weight.SCB, statistics)


def test_a_copy_that_another_module_uses_is_used_again() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    copies: dict[int, dict[torch.device, torch.Tensor]] = {first.weight.data_ptr(): {}}
    for module in (first, second):
        set_module_tensor_to_device(module, "weight", "meta", tied_params_map=copies)
    assert first.weight is second.weight
    value = torch.ones(2, 2)
    copies = {value.data_ptr(): {}}
    for module in (first, second):
        set_module_tensor_to_device(module, "weight", "cpu", value=value, tied_params_map=copies)
    assert first.weight is second.weight
    assert list(copies[value.data_ptr()]) == [torch.device("cpu")]


def test_tensors_without_memory_are_never_taken_for_each_other() -> None:
    module = nn.Linear(2, 2, device="meta")
    copies: Any = {0: {torch.device("meta"): torch.empty(9)}}
    set_module_tensor_to_device(module, "weight", "meta", tied_params_map=copies)
    assert module.weight.shape == (2, 2)


def test_lists_of_names_have_an_end() -> None:
    assert listed([]) == "nothing"
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcd"), most=2) == "a, b and 2 more"
