"""Models that are compiled region by region."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate.utils.other as original
import pytest
import torch
from torch._dynamo.eval_frame import OptimizedModule

from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.precision.forward import install
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.prepare import compile_regions as regions
from accelerate_cpp.utils import other

EAGER = {"backend": "eager"}


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


def test_a_forward_in_mixed_precision_runs_the_compiled_blocks() -> None:
    torch._dynamo.reset()
    model = install(Model(), precision_for("bf16", torch.device("cpu")))
    result, compilations = compiled(model)
    output = result(torch.rand(2, 3))
    assert output.dtype == torch.float32
    assert torch.equal(output, output.bfloat16().float())
    assert len(compilations) >= 2
    assert result.forward._module is result
    assert model.forward._module is model


@pytest.mark.parametrize("by_region", [False, True])
@pytest.mark.parametrize("given", [Model(), torch.nn.Linear(3, 1)], ids=["blocks", "no blocks"])
def test_a_model_is_prepared_compiled_by_regions_or_as_a_whole(by_region: bool, given: torch.nn.Module) -> None:
    dynamo = DynamoConfig(EAGER, by_region)
    inner = regions.compile_prepared_regions(given, dynamo)
    in_regions = by_region and isinstance(given, Model)
    assert (inner is not given) is in_regions
    for wrapped in (inner, torch.nn.DataParallel(inner)):
        result = regions.compile_prepared(wrapped, dynamo)
        assert regions.has_compiled_regions(result)
        assert regions.is_compiled_module(result) is not in_regions
        assert (result if in_regions else result._orig_mod) is wrapped
        assert regions.taken_out(result, keep_torch_compile=False) is given


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel])
@pytest.mark.parametrize("compile_before", [partial(torch.compile, **EAGER), partial(regions.compile_regions, **EAGER)])
def test_a_compiled_model_is_not_compiled_again(
    compile_before: Callable[[torch.nn.Module], torch.nn.Module], wrap: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    model = compile_before(Model())
    for by_region in (False, True):
        dynamo = DynamoConfig(EAGER, by_region)
        assert regions.compile_prepared_regions(model, dynamo) is model
        wrapped = wrap(model)
        assert regions.compile_prepared(wrapped, dynamo) is wrapped


def test_nothing_is_compiled_unless_it_is_asked_for() -> None:
    model = Model()
    assert regions.compile_prepared_regions(model, None) is regions.compile_prepared(model, None) is model


def test_models_do_not_use_up_the_recompilations_of_one_another() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    precision = precision_for("bf16", torch.device("cpu"))
    models = [install(Model(), precision) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for model in models:
        regions.compile_prepared(model, DynamoConfig({"backend": backend}))(torch.rand(2, 3))
    assert len(graphs) == len(models)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_model_is_taken_out_of_its_wrapper_and_stays_in_it(wrapped: bool) -> None:
    model = Model()
    given = torch.nn.DataParallel(model) if wrapped else model
    result = torch.compile(given, **EAGER)
    apart = regions.taken_out(result, keep_torch_compile=True)
    assert apart._orig_mod is model
    assert result._orig_mod is given
    assert (apart is result) is not wrapped
    assert torch.equal(apart(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert regions.taken_out(result, keep_torch_compile=False) is model
