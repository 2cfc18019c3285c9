from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.runtime import progress
from accelerate_cpp.runtime.progress import ProgressReporter, open_progress
from accelerate_cpp.runtime.progress_board import Board, Standing, board
from accelerate_cpp.state import AcceleratorState, GradientState

CPU = torch.device("cpu")


@pytest.fixture
def watched() -> Iterator[Board]:
    with board(range(2)) as made:
        yield made


def opened(watched: Board, monkeypatch: pytest.MonkeyPatch) -> ProgressReporter:
    monkeypatch.setenv("ACCELERATE_CPP_BOARD", f"{watched.descriptor}:1")
    made = open_progress(CPU)
    assert made is not None
    return made


def standing(watched: Board) -> Standing:
    return watched.look()[1]


def test_without_a_launcher_that_watches_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_CPP_BOARD", raising=False)
    assert open_progress(CPU) is None


def test_variable_without_its_descriptor_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_BOARD", "0:1")
    assert open_progress(CPU) is None


def test_steps_are_counted_and_memory_is_told(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    for _ in range(3):
        made.step_ended()
    seen = standing(watched)
    assert seen.steps == 3
    assert seen.resident_bytes > 1 << 20
    assert seen.device_bytes == 0
    assert math.isnan(seen.loss)
    assert all(seconds >= 0 for seconds in seen.step_seconds)


def test_loss_of_the_first_step_is_told_and_of_later_ones_once_in_an_interval(
    watched: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(watched, monkeypatch)
    for loss in (1.0, 2.0, 3.0):
        made.saw_loss(torch.tensor(loss, requires_grad=True) * 1)
        made.step_ended()
    assert standing(watched).loss == 1.0
    monkeypatch.setattr(progress, "_STATE_INTERVAL_NS", 0)
    made._state_due_ns = 0
    made.step_ended()
    assert standing(watched).loss == 2.0  # kept when the first had been told
    made.step_ended()
    assert standing(watched).loss == 2.0


def test_loss_that_is_a_sum_is_shown_as_a_mean(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(torch.tensor(6.0), torch.tensor(4))
    made.step_ended()
    assert standing(watched).loss == 1.5


@pytest.mark.parametrize("loss", [torch.ones(2), torch.tensor(1), torch.nn.Parameter(torch.tensor(1.0)), "x"])
def test_other_losses_are_passed_over(watched: Board, monkeypatch: pytest.MonkeyPatch, loss: object) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(loss)
    made.step_ended()
    assert math.isnan(standing(watched).loss)


def test_no_weight_at_all_gives_no_mean(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(torch.tensor(0.0), 0.0)
    made.step_ended()
    assert math.isnan(standing(watched).loss)


def test_facade_tells_of_steps_and_losses_but_not_of_passes_that_only_accumulate(
    watched: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_BOARD", f"{watched.descriptor}:1")
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(4):
            with accelerator.accumulate(model):
                losses.append(model(torch.ones(1, 1)).mean())
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    seen = standing(watched)
    assert seen.steps == 2
    assert seen.loss == pytest.approx(losses[0].item())
