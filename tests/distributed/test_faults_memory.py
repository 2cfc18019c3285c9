"""What happens where memory runs out, or where the system refuses memory files and process descriptors."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sandbox
from faults import TEST, Job, Raised, await_event, connect, job_folder, meet, raised_by, rank, run_job, tell

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Record = Callable[[str, object], None]
KILLED = {1: -signal.SIGKILL}
# What is aimed at is 2 s; machines may be busy.
SOON = 20.0

needs_mounts = pytest.mark.skipif(not sandbox.may_have_own_mounts(), reason="this user may not mount")


def fill_shared_memory() -> None:
    sandbox.shrink_shared_memory(1 << 16)
    sandbox.refuse_memfd_and_pidfd(errno.ENOSYS)


def reach_control_group_limit() -> None:
    sandbox.limit_control_group(1 << 16)


def use_up_descriptors() -> None:
    few = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))


SHORTAGES: dict[str, tuple[Callable[[], None], str]] = {
    "full tmpfs": (fill_shared_memory, "docker run --shm-size"),
    "control group": (reach_control_group_limit, "65536 bytes left"),
    "descriptors": (use_up_descriptors, "Too many open files"),
}


def form_a_group(shortage: str) -> Raised:
    """Rank 1 alone is short of something."""
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    store = dist.FileStore(str(job_folder() / "store"), 2)
    store.set("opened", "")
    if rank() == 1:
        SHORTAGES[shortage][0]()
    return raised_by(lambda: dist.init_process_group("cpu:shm", store=store, rank=rank(), world_size=2))


@needs_mounts
@pytest.mark.parametrize("shortage", ["full tmpfs", "control group"])
def test_a_rank_that_is_short_of_memory_says_of_what_and_the_other_says_which_rank(
    shortage: str, record_property: Record
) -> None:
    other, own = run_job(form_a_group, 2, shortage)
    record_property("seconds", other.at - own.at)
    assert own.kind == "SystemFailure", own
    assert "bytes of shared memory" in own.message
    assert SHORTAGES[shortage][1] in own.message
    assert other.kind == "PeerLost", other
    assert "rank 1" in other.message
    assert other.at - own.at < SOON


def large_model() -> Any:
    import torch

    return torch.nn.Linear(1000, 1000)


def prepare_a_model() -> Raised:
    """Of rank 1, whose control group has too little left for the gradients."""
    from accelerate_cpp import Accelerator

    connect()
    accelerator = Accelerator(cpu=True)
    if rank() == 1:
        reach_control_group_limit()
    return raised_by(lambda: accelerator.prepare(large_model()))


@needs_mounts
def test_a_model_whose_gradients_do_not_fit_is_refused_on_every_rank(record_property: Record) -> None:
    other, own = run_job(prepare_a_model, 2)
    record_property("seconds", other.at - own.at)
    assert own.kind == "SystemFailure", own
    assert "the control group" in own.message
    assert other.kind == "PeerLost", other
    assert "rank 1" in other.message
    assert other.at - own.at < SOON


def allocate_shared_tensors() -> Raised:
    import torch

    import accelerate_cpp

    dist = connect()
    if rank() == 1:
        reach_control_group_limit()
    raised = raised_by(lambda: accelerate_cpp.shared_empty(1 << 20)) if rank() == 1 else None
    data = torch.full((100_000,), float(rank()))
    dist.all_reduce(data)
    assert data.mean() == 1
    return raised


@needs_mounts
def test_a_shared_tensor_that_does_not_fit_is_refused_and_the_group_goes_on() -> None:
    _, own = run_job(allocate_shared_tensors, 2)
    assert own.kind == "SystemFailure", own
    assert "allocating 4194304 bytes of shared memory: the control group" in own.message


def train_without_memfd(error: int, killed: bool) -> tuple[float, Raised]:
    """In a sandbox of its own, each rank."""
    import torch

    from accelerate_cpp import Accelerator

    sandbox.refuse_memfd_and_pidfd(error)
    for refused in (lambda: os.memfd_create("x"), lambda: os.pidfd_open(os.getppid())):
        with pytest.raises(OSError, match=os.strerror(error)):
            refused()
    dist = connect()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(10, 10))
    accelerator.backward(model(torch.full((2, 10), float(rank()))).sum())
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:" not in maps
    assert "/dev/shm/" in maps
    large = torch.ones(1 << 20)
    dist.all_reduce(large)
    assert large.mean() == dist.get_world_size()
    meet("trained")
    if killed and rank() == 1:
        tell("ready")
        await_event("never", TEST)
    gradient = model.module.weight.grad.mean().item()
    return gradient, raised_by(lambda: dist.all_reduce(large)) if killed else raised_by(dist.barrier)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
def test_training_goes_on_where_memfd_and_pidfd_are_refused(error: int) -> None:
    for gradient, raised in run_job(train_without_memfd, 2, error, False):
        assert gradient == 1.0
        assert raised.kind == "nothing", raised


def test_a_killed_rank_is_named_where_memfd_and_pidfd_are_refused(record_property: Record) -> None:
    with Job(train_without_memfd, 3, errno.EPERM, True) as job:
        job.await_event("ready", 1)
        at = job.signal(1, signal.SIGKILL)
        outcomes = job.finish(failing=KILLED)
    for outcome in (outcomes[0], outcomes[2]):
        _, raised = outcome.value
        record_property("seconds", raised.at - at)
        assert raised.kind == "PeerLost", raised
        assert "rank 1 has ended" in raised.message
        assert raised.at - at < SOON
