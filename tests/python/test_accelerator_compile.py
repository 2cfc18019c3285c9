"""Models that are compiled while they are prepared, in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.checkpoint.safetensors_file import read_safetensors
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.utils import has_compiled_regions, is_compiled_module
from accelerate_cpp.utils.dataclasses import DynamoBackend, TorchDynamoPlugin


@pytest.fixture(autouse=True)
def no_state(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)


class Network(torch.nn.Module):
    """Two blocks that are alike, normalisation with buffers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = torch.relu(block(x))
        return {"logits": self.head(self.norm(x))}


def trained(steps: int = 3, **arguments: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after a few steps that accumulate, clip and, in fp16, scale."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **arguments)
    network = Network()
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(2 * steps):
        with accelerator.accumulate(model):
            loss = model(torch.linspace(-1, 1, 24).reshape(6, 4) * (step + 1))["logits"].square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_training_gives_the_weights_that_it_gives_without(precision: str, regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    losses, weights = trained(mixed_precision=precision)
    found, compiled_weights = trained(mixed_precision=precision, dynamo_plugin=plugin)
    tolerance = 1e-5 if precision == "no" else 2e-2
    torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(compiled_weights, weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "ask",
    [
        {"dynamo_backend": "eager"},
        {"dynamo_backend": DynamoBackend.EAGER},
        {"dynamo_plugin": TorchDynamoPlugin(backend="Eager")},
        {},
    ],
    ids=["text", "member", "plugin", "variable"],
)
@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_a_model_is_compiled_where_that_was_asked_for(
    ask: dict[str, Any], evaluation_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ask:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    accelerator = Accelerator(cpu=True, **ask)
    network = Network()
    model = accelerator.prepare_model(network, evaluation_mode=evaluation_mode)
    assert accelerator.state.dynamo_plugin.backend is DynamoBackend.EAGER
    assert is_compiled_module(model)
    assert model._orig_mod is network
    assert accelerator.prepare(model) is model


def test_an_argument_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    network = Network()
    assert Accelerator(cpu=True, dynamo_backend="no").prepare(network) is network
    assert Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", disable=True)).prepare(network) is network


def test_options_reach_the_compiler_as_they_are_when_a_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def recording(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        calls.append(options)
        return model

    monkeypatch.setattr(torch, "compile", recording)
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=False))
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.state.dynamo_plugin.mode = "max-autotune"
    accelerator.prepare(torch.nn.Linear(1, 1))
    for call in calls:
        call.pop("isolate_recompiles", None)  # from torch 2.13 on
    assert calls == [
        {"backend": "inductor", "dynamic": False},
        {"backend": "inductor", "dynamic": False, "mode": "max-autotune"},
    ]


def test_a_mode_beside_options_is_refused_when_a_model_is_prepared() -> None:
    plugin = TorchDynamoPlugin(backend="inductor", mode="max-autotune", options={"max_autotune": True})
    with pytest.raises(InvalidArgument, match="mode"):
        Accelerator(cpu=True, dynamo_plugin=plugin).prepare(torch.nn.Linear(1, 1))


def test_fullgraph_refuses_breaks() -> None:
    class Breaking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    assert accelerator.prepare(Network())(torch.rand(2, 4))["logits"].shape == (2, 1)
    with pytest.raises(Exception, match="graph_break"):
        accelerator.prepare(Breaking(4, 1))(torch.rand(2, 4))


def prepared(regional: bool, **arguments: Any) -> tuple[Accelerator, Network, Any]:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator, network = Accelerator(cpu=True, dynamo_plugin=plugin, **arguments), Network()
    return accelerator, network, accelerator.prepare(network)


@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_is_unwrapped(regional: bool) -> None:
    accelerator, network, model = prepared(regional, mixed_precision="bf16")
    assert has_compiled_regions(model)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is network
    assert "_original_forward" in network.__dict__
    assert "_original_forward" not in accelerator.unwrap_model(model, False, keep_torch_compile=False).__dict__


@pytest.mark.parametrize("regional", [False, True])
def test_states_and_files_have_the_names_of_the_model(regional: bool, tmp_path: Path) -> None:
    accelerator, network, model = prepared(regional)
    names = network.state_dict().keys()
    assert accelerator.get_state_dict(model).keys() == names
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    for folder in ("model", "state"):
        assert read_safetensors(tmp_path / folder / "model.safetensors", "weights").keys() == names


@pytest.mark.parametrize("prepare_after", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("prepare_before", [True, False], ids=["from compiled", "from not compiled"])
def test_a_checkpoint_goes_from_compiled_models_to_others_and_back(
    prepare_before: bool, prepare_after: bool, tmp_path: Path
) -> None:
    def make(compiles: bool) -> tuple[Accelerator, Network]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, network = Accelerator(cpu=True, dynamo_backend="eager" if compiles else "no"), Network()
        accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
        return accelerator, network

    accelerator, before = make(prepare_before)
    accelerator.save_state(tmp_path)
    accelerator, after = make(prepare_after)
    assert not torch.equal(after.head.weight, before.head.weight)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(after.state_dict(), before.state_dict())


def test_the_plan_of_a_compiled_model_is_that_of_the_model() -> None:
    plans = []
    for backend in ("no", "eager"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend=backend)
        plans.append(accelerator.precision_plan(accelerator.prepare(Network())))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("make", [lambda: torch.compile(Network(), backend="eager"), Network])
def test_a_model_is_compiled_once(make: Callable[[], Any]) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(make())
    assert is_compiled_module(model)
    assert not has_compiled_regions(model._orig_mod)


def test_a_second_accelerator_compiles_as_the_first_unless_it_says_otherwise() -> None:
    Accelerator(cpu=True, dynamo_backend="eager")
    assert is_compiled_module(Accelerator().prepare(Network()))
    assert not is_compiled_module(Accelerator(dynamo_backend="no").prepare(Network()))


@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_is_freed(regional: bool) -> None:
    accelerator, network, model = prepared(regional)
    model(torch.rand(2, 4))["logits"].sum().backward()
    weight = weakref.ref(network.head.weight)
    del network
    (model,) = accelerator.free_memory(model)
    gc.collect()
    assert weight() is None
