"""What ranks agree on in each step within torch's Join, for a group of one; more in tests/distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from accelerate_cpp._native import create_backend
from accelerate_cpp.parallel.data_parallel import Agreement, DataParallel, UnevenInputs, agree

MINUTE = timedelta(minutes=1)


def model() -> DataParallel:
    communicator = create_backend(dist.HashStore(), 0, 1, MINUTE).communicator
    return DataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)), communicator, MINUTE)


def test_ranks_agree_on_the_first_that_trains() -> None:
    wrapped = model()
    assert agree(wrapped, trains=True, averages=True) == Agreement(True, False, 0, 1.0)
    assert agree(wrapped, trains=True, broadcasts=True, weight=3.0) == Agreement(False, True, 0, 1.0)


def test_a_rank_without_batches_mirrors_what_others_do() -> None:
    wrapped = model()
    UnevenInputs(wrapped).post_hook(is_last_joiner=True)
    wrapped.set_weight(1.0)
    wrapped.take_part_without_gradients()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
