"""Shared memory in real processes: of data-loader workers, under few descriptors, and under a control group's limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

MODEL_BYTES = 24 << 20
LIMIT_BYTES = 600 << 20
SHARE_BYTES = 300 << 20


def may_see_mapped_files() -> bool:
    try:
        return any(entry.stat() for entry in os.scandir("/proc/self/map_files"))
    except OSError:
        return False


def shared_memory_bytes(processes: list[int]) -> int:
    """Memory of all memory files of ours that these processes have mapped."""
    files = {}
    for process in processes:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if "memfd:accelerate_cpp" in line:
                status = os.stat(f"/proc/{process}/map_files/{line.split()[0]}")
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def trains_with_persistent_workers() -> int:
    """Bytes of shared memory of all ranks and their workers, which were forked before the buckets were made anew."""
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator

    class Backwards(torch.nn.Module):
        """Its gradients do not arrive in the order in which the buckets are planned at first."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(MODEL_BYTES >> 22))

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                data = layer(data)
            return data

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(list(torch.ones(1024, 1024)), batch_size=2, num_workers=2, persistent_workers=True)
    model, loader = accelerator.prepare(Backwards(), loader)
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).sum())
        if step == 150:
            break
    own = [os.getpid(), *map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    assert len(own) >= 3
    processes = [process for process in accelerator.gather(torch.tensor((own + [0] * 8)[:8])).tolist() if process]
    measured = shared_memory_bytes(processes) if accelerator.is_main_process else 0
    accelerator.wait_for_everyone()
    return measured


@pytest.mark.skipif(not may_see_mapped_files(), reason="this user may not look at what processes have mapped")
def test_workers_of_loaders_do_not_keep_the_memory_of_gradients_that_were_moved() -> None:
    measured = run_processes(trains_with_persistent_workers, 2)[0]
    staging = 20 << 20
    assert 2 * MODEL_BYTES <= measured <= 2 * MODEL_BYTES + staging


def many_shared_tensors() -> bool:
    import torch

    import accelerate_cpp
    from accelerate_cpp.comm.backend import register

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    register()
    import torch.distributed as dist

    dist.init_process_group("cpu:shm")
    tensors = [accelerate_cpp.shared_empty(1 << 18) for _ in range(250)]
    for group in [None, dist.new_group([0, 1]), dist.new_group([0, 1])]:
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + dist.get_rank())
            dist.all_reduce(tensor, group=group)
            if not torch.equal(tensor, torch.full_like(tensor, 2 * number + 1)):
                return False
    return True


def test_shared_tensors_are_not_limited_by_the_limit_of_open_files() -> None:
    assert run_processes(many_shared_tensors, 2) == [True, True]


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of version 1 or 2 with LIMIT_BYTES of memory."""
    name = f"accelerate_cpp_test_{os.getpid()}"
    for root, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup") / root / name
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(LIMIT_BYTES))
                (group / "memory.swappiness").exists() and (group / "memory.swappiness").write_text("0")
            except OSError:
                group.rmdir()
                continue
            yield group
            group.rmdir()
            return
    pytest.skip("this user may not make control groups that limit memory")


def takes_more_than_half(group: str) -> str:
    import torch

    import accelerate_cpp
    from accelerate_cpp.comm.backend import register

    own = Path(group) / "cgroup.procs"
    own.write_text(str(os.getpid()))
    register()
    import torch.distributed as dist

    dist.init_process_group("cpu:shm")
    ready = torch.zeros(1)
    dist.all_reduce(ready)
    try:
        tensor = accelerate_cpp.shared_empty(SHARE_BYTES // 4)
        raised = "nothing" if tensor.sum() == 0 else "wrong"
    except Exception as error:
        raised = type(error).__name__ + ": " + str(error)
    dist.all_reduce(ready)
    dist.destroy_process_group()
    return raised


def test_one_of_two_ranks_that_take_the_same_room_is_refused_and_none_is_killed(control_group: Path) -> None:
    outcomes = start_processes(takes_more_than_half, 2, str(control_group))
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    raised = sorted(outcome.value for outcome in outcomes)
    assert raised[1] == "nothing", raised
    assert raised[0].startswith("SystemFailure: "), raised
    assert f"the control group {control_group} has" in raised[0]
