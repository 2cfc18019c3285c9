"""Memory of models: what is computed without data is what real models take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_cpp.placement.model_memory import (
    OPTIMIZERS,
    Alive,
    activation_bytes,
    activation_bytes_by_module,
    model_size,
    optimizer_bytes,
    peak_activation_bytes,
    saved_bytes,
    training_memory,
)


class Tied(nn.Module):
    """A small language model whose head has the weights of its embedding, with a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(7))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.block(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(batch, length, dtype=torch.long),), {"labels": torch.zeros(batch, length, dtype=torch.long)}


def on_meta(model_class: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model_class()


def test_the_size_is_that_of_a_real_model_with_shared_weights_once() -> None:
    real = Tied()
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in real.state_dict().values()}
    assert model_size(on_meta(Tied), "float32").total == sum(storages.values())


def test_other_dtypes_shrink_floating_point_numbers_only() -> None:
    model, integers = on_meta(Tied), 7 * 8
    whole = model_size(model, "float32").total - integers
    for dtype, part in (("float16", 2), ("int8", 4), ("int4", 8)):
        assert model_size(model, dtype).total == whole // part + integers
    assert model_size(nn.Linear(3, 1, bias=False), "int4").total == 2


def test_the_largest_layer_is_the_largest_module_without_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)))
    assert model_size(model, "float32").largest_layer == 4 * (4 * 100 + 100)
    assert model_size(model, "float16").largest_layer == 2 * (4 * 100 + 100)
    assert model_size(nn.Identity(), "float32").largest_layer == 0


def test_what_a_model_calls_indivisible_is_one_layer() -> None:
    model = on_meta(Tied)
    apart = model_size(model, "float32").largest_layer
    model._no_split_modules = ["TransformerEncoderLayer"]  # as models of transformers say it
    assert apart == 4 * 3 * 16 * 16  # the weights of queries, keys and values, which no module without modules has
    assert model_size(model, "float32").largest_layer == sum(p.nbytes for p in model.block.parameters())


def test_sizes_are_those_of_the_original() -> None:
    utils = pytest.importorskip("accelerate.utils")
    tied = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9))
    tied[2].weight = tied[0].weight
    for model in (tied, nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 100)))):
        total, (largest, _) = utils.calculate_maximum_sizes(model)
        size = model_size(model, "float32")
        assert (size.total, size.largest_layer) == (total, largest)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_are_those_of_a_real_step(name: str) -> None:
    real = Tied()
    optimizer = OPTIMIZERS[name](real.parameters())
    (args, kwargs) = tokens(2, 7)
    real(*args, **kwargs).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert optimizer_bytes(on_meta(Tied), name) == sum(value.nbytes for value in states)


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    model = on_meta(Tied)
    model.block.requires_grad_(False)
    memory = training_memory(model, "sgd_momentum", 5)
    assert memory.parts()["gradients"] == memory.optimizer == 4 * 40 * 16
    assert (memory.weights, memory.activations) == (model_size(model, "float32").total, 5)
    assert optimizer_bytes(model.requires_grad_(False), "adam") == 0


def test_activations_of_two_layers_are_the_input_and_what_is_between() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert activation_bytes(model, lambda: ((torch.zeros(3, 8),), {})) == 4 * (3 * 8 + 3 * 16)


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (2, 5), (3, 11)])
def test_activations_are_those_of_a_real_run(batch: int, length: int) -> None:
    real = Tied()
    (args, kwargs) = tokens(batch, length)
    saved = saved_bytes(lambda: real(*args, **kwargs), [*real.parameters(), *real.buffers()])
    assert activation_bytes(on_meta(Tied), lambda: tokens(batch, length)) == saved > 0


def test_mixed_precision_saves_what_a_real_run_does() -> None:
    real = Tied()
    (args, kwargs) = tokens(4, 9)
    saved = saved_bytes(lambda: real(*args, **kwargs), [*real.parameters(), *real.buffers()], torch.bfloat16)
    computed = activation_bytes(on_meta(Tied), lambda: tokens(4, 9), torch.bfloat16)
    # The fake tensors of some normalisations keep their statistics in 16 bits, the kernels in 32.
    assert computed == pytest.approx(saved, rel=0.02)
    assert computed != activation_bytes(on_meta(Tied), lambda: tokens(4, 9))


def test_modules_have_what_is_saved_in_them_and_not_in_modules_within() -> None:
    found = activation_bytes_by_module(on_meta(Tied), lambda: tokens(2, 5))
    assert sum(found.values()) == activation_bytes(on_meta(Tied), lambda: tokens(2, 5))
    assert found["embedding"] == 8 * 2 * 5
    assert found["block.linear2"] == 4 * 2 * 5 * 32
    assert found[""] > 0  # the loss
    assert not any(name.startswith("block.self_attn.") for name in found)  # it reads its weights without calling them


def test_modules_have_less_in_a_smaller_dtype_and_keep_no_hooks() -> None:
    model = on_meta(Tied)
    whole = activation_bytes_by_module(model, lambda: tokens(2, 5))
    half = activation_bytes_by_module(model, lambda: tokens(2, 5), torch.bfloat16)
    assert half["block.linear2"] == whole["block.linear2"] / 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_alive_at_most_is_that_of_a_real_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    peak = peak_activation_bytes(model, lambda: ((torch.zeros(3, 8),), {}))
    real, x = model.to_empty(device="cpu"), torch.zeros(3, 8)
    alive = Alive([*real.parameters()])
    with torch.no_grad(), alive:
        real(x + 0)
    # Inputs stay, and the first two results are there together; the last layer's is smaller.
    assert peak == alive.peak == 4 * (3 * 8 + 2 * 3 * 16)
    half = peak_activation_bytes(model, lambda: ((torch.zeros(3, 8, dtype=torch.float16),), {}), torch.float16)
    assert half == peak / 2


def test_storages_count_once_and_no_longer_than_they_live() -> None:
    alive = Alive([])
    with alive:
        x = torch.zeros(4)
        x.view(2, 2).add_(1)
        del x
        torch.zeros(2)
    assert alive.peak == 16


def test_what_is_saved_goes_when_the_graph_goes() -> None:
    layer, x = nn.Linear(8, 8), torch.zeros(3, 8)
    assert saved_bytes(lambda: layer(x), layer.parameters()) == x.nbytes
    with torch.no_grad():
        assert saved_bytes(lambda: layer(x), layer.parameters()) == 0


def test_the_model_stays_as_it_is() -> None:
    model = on_meta(Tied)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    activation_bytes(model, lambda: tokens(1, 3))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_forward_pass_that_looks_at_values_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(Exception, match="_local_scalar_dense"):
        activation_bytes(Looking(3, 3), lambda: ((torch.zeros(1, 3),), {}))
    assert not caplog.records
