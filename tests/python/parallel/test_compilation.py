"""What surrounds compiled models, and frames that are not compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate_cpp.parallel import compilation


@pytest.fixture
def graphs() -> list[list[str]]:
    torch._dynamo.reset()
    return []


def recording(graphs: list[list[str]]) -> Callable[..., Any]:
    """A compiler that writes down the operations of each graph."""

    def compiler(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    return compiler


def test_a_compiled_module_is_taken_out_of_its_wrapper() -> None:
    model = torch.nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    assert compilation.is_compiled_module(compiled)
    assert not compilation.is_compiled_module(model)
    for take_out in (compilation.inside_compiler, compilation.without_compiler):
        assert take_out(compiled) is take_out(model) is model


def test_the_original_of_compiled_regions_is_what_they_name() -> None:
    model, with_regions = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with_regions.__dict__["_orig_mod"] = model
    assert compilation.inside_compiler(with_regions) is with_regions
    assert compilation.original_of_regions(with_regions) is compilation.without_compiler(with_regions) is model


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(("recursive", "expected"), [(False, [["add"]]), (True, [])])
def test_an_interpreted_function_is_passed_over_and_what_it_calls_unless_it_is_recursive(
    recursive: bool, expected: list[list[str]], graphs: list[list[str]]
) -> None:
    def double_and_add(x: torch.Tensor) -> torch.Tensor:
        return add_one(x * 2)

    function = torch.compile(compilation.interpreted(recursive)(double_and_add), backend=recording(graphs))
    assert function(torch.ones(1)).item() == 3.0
    assert graphs == expected


def test_a_compiled_function_leaves_out_the_interpreted_one_that_it_calls(graphs: list[list[str]]) -> None:
    @compilation.interpreted(recursive=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    function = torch.compile(lambda x: add_one(double(x - 1)), backend=recording(graphs))
    assert function(torch.ones(1)).item() == 1.0
    assert graphs == [["sub"], ["add"]]


def test_none_of_it_loads_the_compiler() -> None:
    script = (
        "import sys, torch\n"
        "from accelerate_cpp.parallel import compilation, data_parallel\n"
        "compilation.without_compiler(torch.nn.Linear(1, 1))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_tf32_is_allowed_where_there_are_gpus_that_have_it() -> None:
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, False
    try:
        compilation.allow_tf32("cpu")
        assert not products.allow_tf32
        compilation.allow_tf32("cuda")
        assert products.allow_tf32
    finally:
        products.allow_tf32 = before
