"""One process: models are used as they are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accelerate_cpp._native import known_statistics
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(3, 1)


def test_prepare_and_unwrap_give_back_the_same_objects(model: torch.nn.Linear) -> None:
    strategy, bundle = SingleStrategy(), Bundle(models=[model])
    assert strategy.prepare(bundle) is bundle
    assert bundle.models == [model]
    assert strategy.unwrap(model) is model


def test_backward_within_no_sync_is_an_ordinary_backward(model: torch.nn.Linear) -> None:
    strategy = SingleStrategy()
    with strategy.no_sync(model):
        strategy.backward(model(torch.ones(1, 3)).sum(), retain_graph=True)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1, 1]]


def test_an_exception_in_backward_reaches_the_caller(model: torch.nn.Linear) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        SingleStrategy().backward(torch.ones(()))


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (float("inf"), 4.0)])
def test_clipping_returns_the_norm_before_and_scales_in_place(norm_type: float, norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([-4.0])
    before = SingleStrategy().clip_grad_norm(parameters, 1.0, norm_type)
    assert before.item() == pytest.approx(norm)
    clipped = torch.cat([parameter.grad for parameter in parameters])
    assert torch.linalg.vector_norm(clipped, norm_type).item() == pytest.approx(1.0, abs=1e-5)


def test_the_state_of_a_model_travels(model: torch.nn.Linear) -> None:
    strategy, other = SingleStrategy(), torch.nn.Linear(3, 1)
    strategy.load_model_state(other, strategy.model_state(model))
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        strategy.load_model_state(other, {**strategy.model_state(model), "extra": torch.ones(1)})


def test_gradients_are_measured_while_they_are_computed_once_somebody_has_asked() -> None:
    model = torch.nn.Linear(3, 2)
    strategy = SingleStrategy()
    strategy.prepare(Bundle(models=[model]))
    parameters = list(model.parameters())
    known_statistics(parameters)
    strategy.backward(model(torch.ones(1, 3)).sum())
    assert known_statistics(parameters) == [(6.0, 0), (2.0, 0)]
    assert model.weight.grad is not None  # Python takes hold of it
    assert known_statistics(parameters) == [None, (2.0, 0)]


def test_clipping_measured_gradients_gives_the_norm_and_the_gradients_that_torch_gives() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(300, 20), torch.nn.Linear(300, 20)]
    models[1].load_state_dict(models[0].state_dict())
    strategy = SingleStrategy()
    strategy.prepare(Bundle(models=[models[0]]))
    for step in range(3):
        batch = torch.randn(4, 300)
        for model in models:
            model.zero_grad()
            model(batch).pow(2).sum().backward()
        own = strategy.clip_grad_norm(models[0].parameters(), 1.0, 2.0)
        reference = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        torch.testing.assert_close(own, reference, msg=f"step {step}")
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_strategy_does_not_keep_models_alive() -> None:
    model = torch.nn.Linear(2, 2)
    strategy = SingleStrategy()
    strategy.prepare(Bundle(models=[model]))
    remains = weakref.ref(model)
    del model
    gc.collect()
    assert remains() is None
