"""Models that are compiled while they are prepared, in two real processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

KINDS: dict[str, dict[str, Any]] = {
    "not": {"backend": "no"},
    "whole": {"backend": "aot_eager"},
    "one graph": {"backend": "aot_eager", "fullgraph": True},
    "regions": {"backend": "aot_eager", "use_regional_compilation": True},
}
OURS = ["whole", "one graph", "regions"]
TORCHS = ["whole", "regions"]  # its own wrapper breaks the graph
CASES = [*((None, kind) for kind in OURS), *(pytest.param("gloo", kind, marks=pytest.mark.long) for kind in TORCHS)]
PRECISIONS = ["no", "bf16", "fp16"]
STEPS = 4


def network() -> Any:
    """Blocks that are alike, normalisation with buffers, and a head."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.norm = torch.nn.BatchNorm1d(4)
            self.head = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return {"logits": self.head(self.norm(x))}

    torch.manual_seed(0)
    return Network()


def accelerator(backend: str | None, kind: str, **arguments: Any) -> Any:
    """One that starts without a state, and the compiler without graphs."""
    import torch

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import TorchDynamoPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    return Accelerator(cpu=True, kwargs_handlers=handlers, dynamo_plugin=TorchDynamoPlugin(**KINDS[kind]), **arguments)


def inputs(own: Any, step: int) -> Any:
    """Batches that differ between the ranks and the steps."""
    import torch

    return torch.linspace(-1, 1, 24).reshape(6, 4) * (1 + step + 10 * own.process_index)


def trained(own: Any) -> dict[str, Any]:
    """Weights after steps of two micro-batches each, and how many graphs were compiled."""
    import torch

    model = network()
    prepared, optimizer = own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS * own.gradient_accumulation_steps):
        with own.accumulate(prepared):
            own.backward(prepared(inputs(own, step))["logits"].square().mean())
            own.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "weights": {name: value.tolist() for name, value in own.get_state_dict(prepared).items()},
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def kind_of(own: Any) -> dict[str, Any]:
    """What prepare and unwrap_model return, and whether a rank alone can compute with the latter while others wait."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from accelerate_cpp.utils import has_compiled_regions, is_compiled_module

    model = network()
    prepared = own.prepare(model)
    wrapper = prepared._orig_mod if is_compiled_module(prepared) else prepared
    own.backward(prepared(inputs(own, 0))["logits"].sum())
    kept = own.unwrap_model(prepared)
    if own.is_main_process:  # the wrapper would wait for the other rank
        assert torch.isfinite(kept(inputs(own, 1))["logits"]).all()
    evaluated = own.prepare_model(network(), evaluation_mode=True)
    return {
        "wrapped": isinstance(wrapper, DistributedDataParallel),
        "compiled": has_compiled_regions(prepared),
        "kept": has_compiled_regions(kept) and not isinstance(kept, DistributedDataParallel),
        "still wrapped": (prepared._orig_mod if is_compiled_module(prepared) else prepared) is wrapper,
        "raw": own.unwrap_model(prepared, keep_torch_compile=False) is model,
        "names": list(own.get_state_dict(prepared)) == list(model.state_dict()),
        "evaluated": has_compiled_regions(evaluated)
        and own.unwrap_model(evaluated) is evaluated
        and not isinstance(evaluated, DistributedDataParallel),
    }


def synchronised(own: Any) -> list[float]:
    """a gradient after a pass that accumulates, one that is triggered, and one whose loss is a sum with a weight."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, seen = own.prepare(model), []
    x = torch.full((1, 1), float(own.process_index + 1))
    with own.no_sync(prepared):
        losses = [prepared(x * factor).sum() for factor in (1, 10)]
    own.backward(losses[0])
    seen.append(model.weight.grad.item())
    with own.trigger_sync_in_backward(prepared):
        own.backward(losses[1])
    seen.append(model.weight.grad.item())
    model.zero_grad()
    own.backward(prepared(x).sum(), weight=float(own.process_index + 1))
    return [*seen, model.weight.grad.item()]


def uneven(own: Any) -> float:
    """The weight after rank 0 had one batch and rank 1 had two."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    prepared, optimizer = own.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with own.join_uneven_inputs([prepared]):
        for _ in range(1 + own.process_index):
            own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
            optimizer.step()
            optimizer.zero_grad()
    return float(model.weight.item())


def restored(own: Any, folder: str) -> bool:
    """Whether a checkpoint brings back the weights of compiled models."""
    import torch

    model = network()
    own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    own.load_state(folder)
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def failed(own: Any) -> tuple[str, float]:
    """The error on this rank when rank 1's backward pass raises, and the gradient of the next pass."""
    import torch

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise MemoryError("no memory here")

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, error = own.prepare(model), ""
    loss = prepared(torch.ones(1, 1)).sum()
    try:
        own.backward(Failing.apply(loss) if own.process_index == 1 else loss)
    except Exception as raised:
        error = str(raised)
    model.zero_grad()
    own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
    return error, float(model.weight.grad.item())


def scenarios(backend: str | None, folder: str) -> dict[str, Any]:
    """Everything that the tests look at, from one start of the processes."""
    results: dict[str, Any] = {}
    for kind in ("not", *(OURS if backend is None else TORCHS)):
        for precision in PRECISIONS:
            own = accelerator(backend, kind, mixed_precision=precision, gradient_accumulation_steps=2)
            results[f"trained {kind} {precision}"] = trained(own)
        looks: dict[str, Callable[[Any], Any]] = {
            "kind": kind_of,
            "synchronised": synchronised,
            "uneven": uneven,
            "restored": lambda own, kind=kind: restored(own, f"{folder}/{kind}"),
        }
        if backend is None:  # other backends leave the other ranks waiting
            looks["failed"] = failed
        for name, look in looks.items():
            results[f"{name} {kind}"] = look(accelerator(backend, kind))
    return results


Results = Callable[[str | None], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of :func:`scenarios` on both ranks, by backend."""

    @cache
    def of(backend: str | None) -> list[dict[str, Any]]:
        return run_processes(scenarios, 2, backend, str(tmp_path_factory.mktemp("shared")), timeout=280)

    return of


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_training_gives_the_weights_that_it_gives_without(
    results: Results, backend: str | None, kind: str, precision: str
) -> None:
    import torch

    tolerance = 1e-5 if precision == "no" else 2e-2
    for rank in results(backend):
        plain, found = (rank[f"trained {name} {precision}"]["weights"] for name in ("not", kind))
        assert found.keys() == plain.keys()
        for name, value in found.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(plain[name]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["whole", "one graph"])
def test_passes_that_accumulate_share_their_graph_with_those_that_synchronise(
    results: Results, kind: str, precision: str
) -> None:
    assert [rank[f"trained {kind} {precision}"]["graphs"] for rank in results(None)] == [1, 1]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_a_model_is_distributed_and_compiled_and_stays_so_when_it_is_unwrapped(
    results: Results, backend: str | None, kind: str
) -> None:
    for rank in results(backend):
        looks = rank[f"kind {kind}"]
        assert looks == dict.fromkeys(looks, True)


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_gradients_are_synchronised_where_they_are_to_be(results: Results, backend: str | None, kind: str) -> None:
    seen = [rank[f"synchronised {kind}"] for rank in results(backend)]
    assert seen == [[1.0, 16.5, 1.0], [2.0, 16.5, 1.0]]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_uneven_inputs_are_joined(results: Results, backend: str | None, kind: str) -> None:
    assert [rank[f"uneven {kind}"] for rank in results(backend)] == [rank["uneven not"] for rank in results(backend)]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_a_checkpoint_brings_the_weights_back(results: Results, backend: str | None, kind: str) -> None:
    assert [rank[f"restored {kind}"] for rank in results(backend)] == [True, True]


@pytest.mark.parametrize("kind", OURS)
def test_a_backward_pass_that_raises_on_one_rank_raises_on_all(results: Results, kind: str) -> None:
    for rank in results(None):
        error, gradient = rank[f"failed {kind}"]
        assert "no memory here" in error
        assert gradient == 1.5


def with_inductor() -> dict[str, Any]:
    """The weights of training as the variables say, and without compilation."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState

    compiled = trained(Accelerator(cpu=True, gradient_accumulation_steps=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = trained(Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_backend="no"))
    return {"compiled": compiled["weights"], "plain": plain["weights"], "graphs": compiled["graphs"]}


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor writes C++, and there is no compiler for it")
@pytest.mark.parametrize("regional", ["False", "True"])
@pytest.mark.long
def test_inductor_trains_as_the_variables_ask_for_it(regional: str, tmp_path: Path) -> None:
    import torch

    environment = {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": regional,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    for result in run_processes(with_inductor, 2, environment=environment, timeout=280):
        assert result["graphs"] > 0
        for name, value in result["compiled"].items():
            torch.testing.assert_close(value, result["plain"][name], rtol=1e-4, atol=1e-5)
