"""Which part of the data a process gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator
from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.data_place import data_rank, data_size

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_without_a_run_there_is_one_process() -> None:
    assert (data_rank(), data_size()) == (0, 1)


@pytest.mark.parametrize(("rank", "samples"), [(0, [0, 1, 4, 5]), (1, [0, 1, 4, 5]), (2, [2, 3, 6, 7])])
def test_processes_that_share_layers_read_the_same_samples(rank: int, samples: list[int]) -> None:
    run = Accelerator(cpu=True)
    assert current.session is not None
    mesh = Mesh(rank, {"dp_shard": 2, "tp": 2})
    current.session = replace(current.session, topology=Topology(rank=rank, world_size=4, mesh=mesh))
    run._session = current.session
    assert (data_rank(), data_size()) == (rank // 2, 2)
    loader = run.prepare_data_loader(DataLoader(range(8), batch_size=2))
    loader.rng_types = None  # the other processes are not there
    assert torch.cat(list(loader)).tolist() == samples
