"""States of random generators."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch

from accelerate_cpp.checkpoint.random_states import check_random_states, random_states, restore_random_states
from accelerate_cpp.errors import CheckpointError


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_generators_continue_where_they_were() -> None:
    states = random_states(step=3)
    first = drawn()
    assert drawn() != first
    restore_random_states(states)
    assert drawn() == first
    assert states["step"] == 3


def test_states_of_devices_that_are_not_here_and_missing_ones_are_left_out() -> None:
    states = random_states(0)
    del states["random_state"]
    states["torch_imaginary_manual_seed"] = [1]
    assert check_random_states(states, "here") == ["'random_state'"]
    restore_random_states(states)


def test_a_state_of_another_form_is_named() -> None:
    with pytest.raises(CheckpointError, match="file: its 'torch_manual_seed' does not fit"):
        check_random_states({"torch_manual_seed": torch.zeros(3, dtype=torch.uint8)}, "file")


@pytest.mark.parametrize("position", [-1, 625, 2_000_000_000])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_position_at_which_numpy_would_read_other_memory_is_refused(position: int, legacy: bool) -> None:
    state = np.random.get_state(legacy=False)
    state["state"]["pos"] = position
    words = ("MT19937", state["state"]["key"], position, 0, 0.0)
    with pytest.raises(CheckpointError, match="its 'numpy_random_seed' does not fit"):
        check_random_states({"numpy_random_seed": words if legacy else state}, "file")


@pytest.mark.parametrize(("left", "following"), [(624, 624), (600, 600), (300, 400), (0, 0), (-1, 0)])
def test_words_that_torch_would_read_behind_its_state_are_refused(left: int, following: int) -> None:
    state = torch.Generator().get_state()
    struct.pack_into("<i", memoryview(state.numpy()).cast("B"), 8, left)
    struct.pack_into("<Q", memoryview(state.numpy()).cast("B"), 16, following)
    with pytest.raises(CheckpointError, match="its 'torch_manual_seed' does not fit"):
        check_random_states({"torch_manual_seed": state}, "file")


@pytest.mark.parametrize("draws", [0, 1, 17, 623, 624, 625, 1300])
def test_states_of_all_positions_are_accepted(draws: int) -> None:
    generator = torch.Generator()
    for _ in range(draws):
        torch.randint(1 << 30, (), generator=generator)
    check_random_states({"torch_manual_seed": generator.get_state()}, "file")
