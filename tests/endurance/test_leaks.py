"""What endless runs have found: each leak by itself, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from processes import run_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

ROUNDS = 8


def saves_in_the_background(folder: Path) -> list[int]:
    """The descriptors of this process after each Accelerator that has saved in the background and gone."""
    import gc
    import os

    import torch

    from accelerate_cpp import Accelerator
    from measures import measured

    counts = []
    for round_ in range(ROUNDS):
        run = Accelerator(cpu=True)
        run.prepare(torch.nn.Linear(4, 4))
        run.save_state(folder / str(round_), blocking=False)
        run.wait_for_checkpoint()
        run.free_memory()
        del run
        gc.collect()
        Accelerator(cpu=True).wait_for_everyone()
        counts.append(measured(os.getpid(), folder)["descriptors"])
    return counts


def test_an_accelerator_that_has_saved_in_the_background_leaves_no_group(tmp_path: Path) -> None:
    for counts in run_processes(saves_in_the_background, 2, tmp_path):
        # A leak adds one each round at least. The store closes connections in its own time: one more or less is none.
        assert counts[-1] < counts[0] + ROUNDS // 2, counts


def two_save_at_a_time(folder: Path) -> list[float]:
    """The weights of two Accelerators, loaded from what they have saved in the background beside each other."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.checkpoint.writers_group import WRITERS_GROUP, WritersGroup

    assert isinstance(WRITERS_GROUP, WritersGroup)
    runs = [Accelerator(cpu=True) for _ in range(2)]
    models = [run.prepare(torch.nn.Linear(512, 512)) for run in runs]
    for save in range(4):
        for number, (run, model) in enumerate(zip(runs, models, strict=True)):
            torch.nn.init.constant_(model.module.weight, 10.0 * save + number)
            run.save_state(folder / f"{number}-{save}", blocking=False)
    for run in runs:
        run.wait_for_checkpoint()
    found = []
    for save in range(4):
        for number, (run, model) in enumerate(zip(runs, models, strict=True)):
            run.load_state(folder / f"{number}-{save}")
            found.append(model.module.weight[0, 0].item())
    return found


def test_two_accelerators_save_in_the_background_beside_each_other(tmp_path: Path) -> None:
    for found in run_processes(two_save_at_a_time, 2, tmp_path):
        assert found == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0]


def makes_groups_of_the_same_ranks(times: int) -> int:
    """How many groups of the same ranks this process has made, one after the end of the other."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    dist.init_process_group("cpu:shm", timeout=timedelta(seconds=120))
    for _ in range(times):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return times


def test_groups_of_the_same_ranks_follow_each_other() -> None:
    """Torch names them alike, so they have the same part of the store: none may find what an earlier one left there."""
    assert run_processes(makes_groups_of_the_same_ranks, 2, 100) == [100, 100]
