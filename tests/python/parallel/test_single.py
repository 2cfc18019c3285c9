"""One process: models are used as they are."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import ModelSteps, Step


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


def test_the_state_of_a_model_has_the_users_names(model: torch.nn.Linear) -> None:
    compiled = torch.compile(model, backend="eager")
    state = SingleStrategy().model_state(compiled)
    assert {name: value.data_ptr() for name, value in state.items()} == {
        "weight": model.weight.data_ptr(),
        "bias": model.bias.data_ptr(),
    }


def test_a_model_is_placed_cast_compiled_by_regions_and_compiled_as_a_whole_in_this_order(
    model: torch.nn.Linear,
) -> None:
    order: list[str] = []

    def step(name: str) -> Step:
        return lambda module: order.append(name) or module

    names = ("place", "cast", "compile_regions", "compile")
    SingleStrategy().prepare(Bundle(models=[model]), [ModelSteps(**{name: step(name) for name in names})])
    assert order == list(names)


def test_gradients_of_the_models_that_a_loss_depends_on_are_divided_by_their_own_totals() -> None:
    strategy = SingleStrategy()
    one, two, other = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    strategy.prepare(Bundle(models=[one, two, other]))
    assert set(strategy.models()) == {one, two, other}
    other.weight.grad = torch.ones(1, 1)
    weights = PassWeights({one: 2.0, two: 0.0, other: 8.0}, {one, two})
    strategy.backward(one(torch.ones(1, 1)) + two(torch.ones(1, 1)), weights)
    assert [model.weight.grad.item() for model in (one, two, other)] == [0.5, 0.0, 1.0]
