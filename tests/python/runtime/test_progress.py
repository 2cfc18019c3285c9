from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.data_loader import prepare_data_loader
from accelerate_cpp.runtime import current, progress
from accelerate_cpp.runtime.progress import ProgressReporter, open_progress
from accelerate_cpp.runtime.progress_board import Board, Standing, board
from accelerate_cpp.runtime.reading import Reading
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
        made.step_ended(Reading())
    seen = standing(watched)
    assert seen.steps == 3
    assert seen.resident_bytes > 1 << 20
    assert seen.device_bytes == 0
    assert math.isnan(seen.loss)
    assert all(seconds >= 0 for seconds in seen.step_seconds)


def test_loss_of_each_step_is_told_on_the_cpu(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    for loss in (1.0, 2.0, 3.0):
        made.saw_loss(torch.tensor(loss, requires_grad=True) * 1)
        made.step_ended(Reading())
        assert standing(watched).loss == loss


def test_loss_on_an_accelerator_is_told_once_in_an_interval_and_at_the_end(
    watched: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(watched, monkeypatch)
    monkeypatch.setattr(made, "_reads_each_loss", False)
    for loss in (1.0, 2.0, 3.0):
        made.saw_loss(torch.tensor(loss))
        made.step_ended(Reading())
    assert standing(watched).loss == 1.0
    made.end()
    assert standing(watched).loss == 3.0


def test_loss_that_is_a_sum_is_shown_as_a_mean(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(torch.tensor(6.0), torch.tensor(4))
    made.step_ended(Reading())
    assert standing(watched).loss == 1.5


@pytest.mark.parametrize("loss", [torch.ones(2), torch.tensor(1), torch.nn.Parameter(torch.tensor(1.0)), "x"])
def test_other_losses_are_passed_over(watched: Board, monkeypatch: pytest.MonkeyPatch, loss: object) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(loss)
    made.step_ended(Reading())
    assert math.isnan(standing(watched).loss)


def test_no_weight_at_all_gives_no_mean(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(watched, monkeypatch)
    made.saw_loss(torch.tensor(0.0), 0.0)
    made.step_ended(Reading())
    assert math.isnan(standing(watched).loss)


@pytest.mark.usefixtures("fresh_state")
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
    assert seen.loss == pytest.approx(losses[-1].item())


def test_position_in_the_pass_that_is_trained_on_is_told(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: now)
    monkeypatch.setenv("ACCELERATE_CPP_BOARD", f"{watched.descriptor}:1")
    try:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(list(range(8)), batch_size=2)
        )
        seen = []
        for one in (loader, accelerator.skip_first_batches(loader, 1)):
            for _ in one:
                now += 1_000_000_000
                optimizer.step()
                at = standing(watched)
                seen.append((at.batches_read, at.batches, at.seconds_left))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    first = [(1, 4, None), (2, 4, 2.0), (3, 4, 1.0), (4, 4, 0.0)]
    assert seen == [*first, (2, 4, None), (3, 4, 1.0), (4, 4, 0.0)]


def test_streams_and_loaders_of_the_program_have_no_length(watched: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    made = opened(watched, monkeypatch)
    reading = Reading()
    own = type("Loader", (), {"end_of_dataloader": False, "remainder": -1})()
    reading.push_loader(own)
    made.step_ended(reading)
    assert (standing(watched).batches_read, standing(watched).batches) == (0, 0)
    for _ in prepare_data_loader(DataLoader(Stream(), batch_size=1)):
        made.step_ended(current.accumulation.reading)
    assert (standing(watched).batches_read, standing(watched).seconds_left) == (3, None)
