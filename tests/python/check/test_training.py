"""Backward passes and steps: what is wrong with the gradients, if anything is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accelerate_cpp.check.observed import CheckFinished, Observed
from accelerate_cpp.check.training import Training

Found = Callable[[], dict[str, str]]


class Loop:
    """A training loop whose steps are told to the watcher."""

    def __init__(self, observed: Observed, prepares: bool = True) -> None:
        self.observed, self.training = observed, Training(observed)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if prepares:
            self.model_is_prepared()
            observed.accelerators[0]._optimizers.append(self.optimizer)
            self.optimizer.optimizer = self.optimizer  # type: ignore[attr-defined]

    def model_is_prepared(self) -> None:
        self.observed.accelerators[0]._models.append(self.model)
        self.training.watch_models([self.model])

    def backward(self, is_plain: bool = False, factor: float = 1.0) -> None:
        loss = self.model(torch.ones(1, 2)).sum() * factor
        self.training.backward(loss, is_plain)
        loss.backward()

    def step(self) -> None:
        self.training.before_step(self.optimizer)
        self.training.after_step(self.optimizer)

    def zero_grad(self) -> None:
        self.training.zero_grad(self.optimizer)
        self.optimizer.zero_grad()


def test_a_loop_that_clears_its_gradients_is_fine(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.zero_grad()
    loop.training.conclude()
    assert found() == {}
    assert (observed.steps, observed.backwards) == (2, 2)


def test_gradients_that_stay_are_an_error(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    for _ in range(2):
        loop.backward()
        loop.step()
    assert found() == {"gradients-not-cleared": "error"}


def test_gradients_that_the_model_clears_are_cleared(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.training.zero_grad_of_model()
        loop.model.zero_grad()
    assert found() == {}


def test_clearing_what_was_accumulated_is_an_error(observed: Observed, found: Found) -> None:
    observed.accumulates, observed.accelerators[0].gradient_accumulation_steps = True, 2
    loop = Loop(observed)
    loop.backward()
    loop.zero_grad()
    assert found() == {"accumulated-gradients-lost": "error"}


def test_what_is_not_prepared_is_told_apart(observed: Observed, found: Found) -> None:
    loop = Loop(observed, prepares=False)
    loop.backward()
    loop.step()
    assert found() == {"unprepared-model": "error", "unprepared-optimizer": "warning"}


def test_gradients_that_a_closure_makes_are_not_asked_for_before_it(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    loop.training.before_step(loop.optimizer, has_closure=True)
    loop.backward()
    loop.training.after_step(loop.optimizer)
    assert found() == {}


def test_an_optimizer_of_other_parameters_is_an_error(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    loop.backward()
    loop.optimizer.param_groups[0]["params"] = list(torch.nn.Linear(2, 1).parameters())
    loop.step()
    assert found() == {"optimizer-without-gradients": "error"}


@pytest.mark.parametrize(("steps", "level"), [(1, "note"), (2, "error")])
def test_a_plain_backward_matters_with_accumulation(observed: Observed, found: Found, steps: int, level: str) -> None:
    observed.accelerators[0].gradient_accumulation_steps = steps
    Loop(observed).backward(is_plain=True)
    assert found() == {"plain-backward": level}


def test_a_loss_that_is_not_finite_is_a_warning(observed: Observed, found: Found) -> None:
    Loop(observed).backward(factor=float("nan"))
    assert found() == {"loss-not-finite": "warning"}


def test_steps_in_every_batch_do_not_go_with_accumulation(observed: Observed, found: Found) -> None:
    observed.accelerators[0].gradient_accumulation_steps = 2
    loop = Loop(observed)
    loop.backward()
    loop.step()
    loop.training.conclude()
    assert found() == {"accumulate-unused": "warning"}


def test_backward_without_a_step_is_a_warning(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    loop.backward()
    loop.training.conclude()
    assert found() == {"never-steps": "warning"}


def test_parameters_without_gradients_are_named(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    loop.model.spare = torch.nn.Parameter(torch.ones(1))
    loop.backward()
    loop.step()
    loop.training.conclude()
    assert found() == {"parameters-without-gradients": "warning"}


def test_a_model_that_is_trained_past_its_wrapper_is_an_error(observed: Observed, found: Found) -> None:
    loop = Loop(observed)
    loss = loop.model.forward(torch.ones(1, 2)).sum()  # past the hooks, as a wrapper that nobody calls
    loop.training.backward(loss)
    loss.backward()
    loop.step()
    loop.training.conclude()
    assert found() == {"prepared-model-unused": "error"}


def test_without_loaders_the_check_ends_at_a_step(observed: Observed) -> None:
    loop = Loop(observed)
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.zero_grad()
    loop.backward()
    with pytest.raises(CheckFinished):
        loop.step()
