"""What a program that reads by itself draws after a checkpoint, compared with the run that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Noise(IterableDataset[torch.Tensor]):
    """Draws its samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            yield number + torch.rand(())


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(len(samples))


def prepared(stateful: bool, stream: bool, seed: int) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    run = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    data = Noise() if stream else torch.arange(12.0)
    return run, run.prepare(DataLoader(data, batch_size=2, shuffle=None if stream else True, collate_fn=noisy))


def drawn(loader: Any) -> list[Any]:
    return [(batch.tolist(), torch.rand(1).item()) for batch in loader]


@pytest.mark.parametrize("stateful", [False, True])
def test_batches_that_are_collated_at_random_go_on_as_without_a_checkpoint(stateful: bool, tmp_path: Path) -> None:
    run, loader = prepared(stateful, False, 0)
    whole: list[Any] = []
    for batch in loader:
        whole.append((batch.tolist(), torch.rand(1).item()))
        if len(whole) == 2:
            run.save_state(str(tmp_path))
    expected = [*whole[2:], *drawn(loader)]
    run, loader = prepared(stateful, False, 9)
    run.load_state(str(tmp_path))
    assert [*drawn(loader if stateful else run.skip_first_batches(loader, 2)), *drawn(loader)] == expected


@pytest.mark.parametrize("stateful", [False, True])
def test_what_is_drawn_beside_a_stream_goes_on_although_its_begin_is_read_again(stateful: bool, tmp_path: Path) -> None:
    run, loader = prepared(stateful, True, 0)
    whole: list[float] = []
    for _ in loader:
        whole.append(torch.rand(1).item())
        if len(whole) == 2:
            run.save_state(str(tmp_path))
    run, loader = prepared(stateful, True, 9)
    run.load_state(str(tmp_path))
    assert [one for _, one in drawn(loader if stateful else run.skip_first_batches(loader, 2))] == whole[2:]


def test_a_state_of_what_was_read_ahead_that_is_none_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run, loader = prepared(False, False, 0)
    for _ in loader:
        run.save_state(str(tmp_path))
        break
    path = tmp_path / "random_states_0.pkl"
    states = torch.load(path, weights_only=False)
    for wrong in ("x", [torch.get_rng_state()], [[torch.zeros(3, dtype=torch.uint8)]]):
        torch.save({**states, "accelerate_cpp_read_ahead": wrong}, path)
        before = torch.get_rng_state()
        with pytest.raises(CheckpointError):
            run.load_state(str(tmp_path))
        assert torch.equal(torch.get_rng_state(), before)
