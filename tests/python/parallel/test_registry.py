"""Which strategy a run uses."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.parallel.registry import STRATEGIES, strategy_for
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import Strategy

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, SingleStrategy), (2, DataParallelStrategy), (8, DataParallelStrategy)]
)
def test_more_than_one_process_means_data_parallelism(world_size: int, kind: type[Strategy]) -> None:
    assert type(strategy_for(world_size=world_size, device=CPU, ddp_kwargs={})) is kind


def test_every_entry_makes_a_strategy() -> None:
    assert all(isinstance(make(CPU, {}), Strategy) for make in STRATEGIES.values())
