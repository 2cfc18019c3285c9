"""Bytes of modules, as the original counts them."""

from __future__ import annotations

import accelerate.utils as original
import accelerate.utils.modeling as original_modeling
import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_sizes import (
    Measure,
    calculate_maximum_sizes,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    top_parts,
)
from accelerate_cpp.plugins.enums import CustomDtype


class Model(nn.Module):
    """Several dtypes, a shared weight, nested modules and buffers."""

    _no_split_modules = ("Sequential",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.blocks[0][0].weight = self.head.weight
        self.register_buffer("mask", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("small", torch.zeros(2).to(torch.float8_e4m3fn), persistent=False)


DTYPES = [None, torch.float16, "float16", torch.float64, torch.int8, "int4"]


def theirs(dtype: object) -> object:
    return original.CustomDtype.INT4 if dtype == "int4" else dtype


def ours(dtype: object) -> object:
    return CustomDtype.INT4 if dtype == "int4" else dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("buffers_only", [False, True])
def test_sizes_are_those_of_the_original(dtype: object, buffers_only: bool) -> None:
    expected = original.compute_module_sizes(Model(), dtype=theirs(dtype), buffers_only=buffers_only)
    assert compute_module_sizes(Model(), dtype=ours(dtype), buffers_only=buffers_only) == expected  # type: ignore[arg-type]


def test_special_dtypes_are_those_of_tensors_of_these_names() -> None:
    special = {"scale": torch.float64, "blocks.1.0.weight": "int8", "blocks.0": torch.float64}
    expected = original.compute_module_sizes(Model(), dtype=torch.float16, special_dtypes=special)
    assert compute_module_sizes(Model(), dtype=torch.float16, special_dtypes=special) == expected


def test_what_has_no_tensors_takes_nothing() -> None:
    assert compute_module_sizes(nn.ReLU())[""] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_summed_as_in_the_original(dtype: object) -> None:
    expected = original_modeling.compute_module_total_buffer_size(Model(), dtype=theirs(dtype))
    assert compute_module_total_buffer_size(Model(), dtype=ours(dtype)) == expected  # type: ignore[arg-type]


def test_a_model_without_buffers_has_none() -> None:
    assert compute_module_total_buffer_size(nn.Linear(1, 1)) == 0


@pytest.mark.parametrize("whole", [None, [], ["Sequential"], ["ModuleList", "Linear"]])
def test_the_largest_layers_are_those_of_the_original(whole: list[str] | None) -> None:
    model = Model()
    sizes = compute_module_sizes(model)
    expected = original.get_max_layer_size(top_parts(model), sizes, whole or [])
    assert get_max_layer_size(top_parts(model), sizes, whole) == expected


def test_sizes_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="no entry 'head'"):
        get_max_layer_size([("head", nn.Linear(1, 1))], {"": 0}, [])


def test_the_maximum_sizes_are_those_of_the_original() -> None:
    assert calculate_maximum_sizes(Model()) == original.calculate_maximum_sizes(Model())


def test_parts_at_first_sight_are_parameters_modules_and_buffers() -> None:
    assert [name for name, _ in top_parts(Model())] == ["scale", "blocks", "head", "mask", "table", "small"]


@pytest.mark.parametrize(
    ("names", "found"), [(None, set()), ("Block", {"Block"}), (["A", None, "B"], {"A", "B"}), ((), set())]
)
def test_classes_are_named_by_one_or_several(names: object, found: set[str]) -> None:
    assert class_names(names) == found  # type: ignore[arg-type]


def test_a_measure_knows_dtypes_by_full_names() -> None:
    measure = Measure(torch.float16, {"a.w": torch.float64})
    tensor = torch.zeros(3)
    assert (measure(tensor, "a.", "w"), measure(tensor, "b.", "w"), measure(tensor, "", "w")) == (24, 6, 6)
