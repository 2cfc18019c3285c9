"""``prepare_pippy`` in one process; tests/distributed/test_inference_pipelines.py has what several do."""

from __future__ import annotations

import inspect

import accelerate.inference as original
import pytest
import torch
from torch import nn

from accelerate_cpp import prepare_pippy
from accelerate_cpp.errors import InvalidArgument

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_it_takes_the_arguments_of_the_original() -> None:
    own, theirs = (inspect.signature(one).parameters for one in (prepare_pippy, original.prepare_pippy))
    assert {name: one.default for name, one in own.items()} == {name: one.default for name, one in theirs.items()}


def test_one_process_runs_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    batch = torch.rand(3, 2)
    expected = model(batch)
    assert prepare_pippy(model, example_args=(batch,)) is model
    assert model.hf_split_points == []
    assert torch.equal(model(batch), expected)


def test_more_stages_than_processes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"split_points=\['1'\] make 2 stages, but there are 1 processes"):
        prepare_pippy(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), split_points="1")


def test_parts_of_a_batch_are_counted() -> None:
    with pytest.raises(InvalidArgument, match="num_chunks=0; expected at least 1"):
        prepare_pippy(nn.Linear(1, 1), num_chunks=0)
