"""Models that are compiled region by region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate.utils.other as original
import pytest
import torch
from torch._dynamo.eval_frame import OptimizedModule

from accelerate_cpp.utils import other, regions


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Model(torch.nn.Module):
    """Blocks, two names for one head, and a place where no module is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(3, 1)
        self.same_head = self.head
        self.absent = None
        self.register_module("adapter", None)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale if self.adapter is None else self.adapter(x)


def compiled(model: torch.nn.Module) -> tuple[torch.nn.Module, list[int]]:
    """The model with regions that a backend compiled, and how many operations each compilation had."""
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(len(list(graph.graph.nodes)))
        return graph.forward

    return regions.compile_regions(model, backend=backend), compilations


def test_every_block_is_compiled_and_blocks_that_are_alike_only_once() -> None:
    torch._dynamo.reset()
    model, x = Model(), torch.rand(2, 3)
    result, compilations = compiled(model)
    with torch.no_grad():  # whether its input requires a gradient tells the first block from the others
        assert torch.equal(result(x), model(x))
    assert all(isinstance(block, OptimizedModule) for block in result.blocks)
    assert len(compilations) == 2  # the three blocks, and the head
    assert regions.has_compiled_regions(result)


def test_the_model_itself_stays_and_shares_its_parameters() -> None:
    model = Model()
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    result, _ = compiled(model)
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == names
    assert not regions.has_compiled_regions(model)
    assert {id(parameter) for parameter in result.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert regions.original_of_regions(result) is model
    assert regions.original_of_regions(model) is model


def test_a_module_with_two_names_stays_one_and_an_absent_one_stays_absent() -> None:
    result, _ = compiled(Model())
    assert result.head is result.same_head
    assert result.adapter is None


def test_a_method_that_was_stored_on_the_model_is_bound_to_the_compiled_one() -> None:
    model = Model()
    model.own_forward = model.forward  # type: ignore[assignment]
    result, _ = compiled(model)
    assert result.own_forward.__self__ is result


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole() -> None:
    model = torch.nn.Linear(1, 1)
    result, _ = compiled(model)
    assert isinstance(result, OptimizedModule)
    assert result._orig_mod is model


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.ModuleList(),
        torch.nn.ModuleList([torch.nn.Linear(1, 1)]),
        torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.ReLU()]),
        torch.nn.Sequential(torch.nn.Linear(1, 1)),
        torch.nn.Sequential(torch.nn.ModuleList([Block(), Block()])),
    ],
)
def test_repeated_blocks_are_found_where_the_original_finds_them(module: torch.nn.Module) -> None:
    assert regions.is_repeated_blocks(module) == original.is_repeated_blocks(module)
    assert regions.has_repeated_blocks(module) == original.has_repeated_blocks(module)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_is_taken_out_of_its_regions_on_request(wrapped: bool) -> None:
    model = Model()
    result, _ = compiled(model)
    given = torch.nn.DataParallel(result) if wrapped else result
    assert other.extract_model_from_parallel(given) is result
    assert other.extract_model_from_parallel(given, keep_torch_compile=False) is model
