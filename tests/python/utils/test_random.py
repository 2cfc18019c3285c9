"""Seeds and generator states with one process."""

from __future__ import annotations

import inspect
import random

import accelerate.utils.random as original
import numpy as np
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import random as module


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("name", ["set_seed", "synchronize_rng_state", "synchronize_rng_states"])
def test_parameters_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(module, name)) == shape(getattr(original, name))


def test_a_seed_fixes_all_generators():
    module.set_seed(5)
    first = draw()
    module.set_seed(5)
    assert draw() == first
    module.set_seed(6)
    assert not set(draw()) & set(first)


def test_the_seed_gives_the_same_numbers_as_in_the_original():
    module.set_seed(5)
    mine = draw()
    original.set_seed(5)
    assert draw() == mine


def test_ranks_draw_different_numbers_if_asked_to(monkeypatch):
    monkeypatch.setattr(module, "process_index", lambda: 2)
    module.set_seed(5, device_specific=True)
    mine = draw()
    module.set_seed(7)
    assert draw() == mine


def test_deterministic_algorithms_are_switched_on():
    try:
        module.set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_process_keeps_its_states():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    module.synchronize_rng_states(["torch", "generator"], generator)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("dice", "unknown random type 'dice'"), ("generator", "none was given"), ("npu", "finds no npu device")],
)
def test_a_generator_that_is_not_there_is_refused(kind, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        module.synchronize_rng_state(kind)
