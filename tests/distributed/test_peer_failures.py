"""What the other ranks say when one dies, stops, raises, is interrupted or does something else; and what is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from processes import Outcome, run_processes, start_processes
from shm_scenarios import meet

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Error = tuple[str, str]


def connect(seconds: float = 120) -> tuple[Any, int]:
    """torch.distributed with backend shm as its default group, and the rank. Returns when all ranks are there."""
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    store, rank, size = next(dist.rendezvous("env://"))
    store.set(f"there/{rank}", "")
    store.wait([f"there/{peer}" for peer in range(size)], timedelta(seconds=120))
    dist.init_process_group("cpu:shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return dist, rank


def error_of(function: Callable[[], Any]) -> Error:
    """Class name and message of what ``function`` raises."""
    try:
        function()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


def interrupted_by(action: Callable[[], None] | None) -> Any:
    """An autograd function that changes nothing and calls ``action`` in its backward pass, if there is one."""
    import torch

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, data: Any) -> Any:
            return data.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            if action is not None:
                action()
            return gradient

    return Interrupted.apply


def backward_of(action: Callable[[], None] | None, late: bool = True) -> Callable[[], None]:
    """A backward pass through a model that the strategy of this run prepared; ``action`` is called during it.

    Args:
        late: after the first gradients have arrived, instead of before.
    """
    import torch
    from torch import nn

    from accelerate_cpp.parallel.bundle import Bundle
    from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, data: Any) -> Any:
            data = self.body(data)
            return self.head(interrupted_by(action)(data)) if late else interrupted_by(action)(self.head(data))

    strategy = DataParallelStrategy(torch.device("cpu"), {})
    model = strategy.prepare(Bundle(models=[Model()])).models[0]
    return lambda: strategy.backward(model(torch.ones(2, 4)).sum())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survivors(outcomes: list[Outcome], died: int) -> list[Error]:
    assert outcomes[died].exit_code == -signal.SIGKILL
    assert all(outcome.exit_code == 0 for outcome in outcomes if outcome.rank != died), outcomes
    return [outcome.value for outcome in outcomes if outcome.rank != died]


def killed_in_collective() -> Error:
    import torch

    dist, rank = connect()
    dist.barrier()
    if rank == 1:
        die()
    return error_of(lambda: dist.all_reduce(torch.ones(4)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_by_those_that_wait_for_it(size: int) -> None:
    for kind, message in survivors(start_processes(killed_in_collective, size), died=1):
        assert kind == "PeerLost"
        assert "rank 1 has ended" in message


def killed_in_backward() -> Error:
    _, rank = connect()
    return error_of(backward_of(die if rank == 1 else None))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_killed_in_backward_is_named_by_the_backward_of_the_others(size: int) -> None:
    for kind, message in survivors(start_processes(killed_in_backward, size), died=1):
        assert kind == "PeerLost"
        assert "rank 1 has ended" in message


def killed_with_a_child() -> Error:
    import torch

    dist, rank = connect()
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            signal.pause()  # lives on, as the worker of a data loader would
        die()
    return error_of(lambda: dist.all_reduce(torch.ones(4)))


def test_a_living_child_does_not_hide_that_its_rank_was_killed() -> None:
    [(kind, message)] = survivors(start_processes(killed_with_a_child, 2), died=1)
    assert kind == "PeerLost"
    assert "rank 1 has ended" in message


def killed_in_a_part(operation: str) -> Error:
    """The ranks 1 and 3 are a group, in which they have the numbers 0 and 1."""
    import torch

    dist, rank = connect()
    part = dist.new_group([1, 3])
    meet("formed", rank, 4)  # rank 0 has the store
    if rank in (0, 2):
        return "nothing", "was raised"
    dist.barrier(part)
    if rank == 3:
        die()
    if operation == "recv":
        return error_of(lambda: dist.recv(torch.ones(4), src=3, group=part))
    first = error_of(lambda: dist.all_reduce(torch.ones(4), group=part))
    return first if operation == "all_reduce" else error_of(lambda: dist.all_reduce(torch.ones(4), group=part))


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce after it has failed", "recv"])
def test_a_rank_killed_in_a_part_of_all_is_named_by_its_number_among_all(operation: str) -> None:
    kind, message = survivors(start_processes(killed_in_a_part, 4, operation), died=3)[1]
    assert kind == "PeerLost"
    assert "rank 3 has ended" in message
    assert "on rank 1" in message
    assert set(re.findall(r"rank (\d)", message)) == {"1", "3"}, message


def different_in_a_part() -> tuple[Error, Error]:
    import torch

    dist, rank = connect()
    part = dist.new_group([1, 2])
    meet("formed", rank, 3)  # rank 0 has the store
    data = torch.ones(4) if rank == 1 else torch.ones(5)
    if rank == 0:
        return ("nothing", "was raised"), ("nothing", "was raised")
    of_messages = error_of(lambda: dist.send(data, 2, part) if rank == 1 else dist.recv(data, 1, part))
    return error_of(lambda: dist.all_reduce(data, group=part)), of_messages


def test_calls_of_a_part_of_all_are_told_by_the_numbers_among_all() -> None:
    _, *differing = run_processes(different_in_a_part, 3)
    for (kind, message), _ in differing:
        assert kind == "MismatchedCollective"
        assert re.findall(r"^  rank (\d)", message, re.MULTILINE) == ["1", "2"], message
    kind, message = differing[1][1]
    assert kind == "MismatchedCollective"
    assert message.startswith("rank 1 sent 4 float32"), message
    assert set(re.findall(r"rank (\d)", message)) == {"1", "2"}, message


def raises_in_backward(late: bool) -> Error:
    def fail() -> None:
        raise ValueError("out of ideas")

    _, rank = connect()
    error = error_of(backward_of(fail if rank == 1 else None, late))
    meet("over", rank, 2)  # rank 1 stays until then: it is not its end that rank 0 notices
    return error


@pytest.mark.parametrize("late", [True, False], ids=["after_the_first_gradient", "before_any_gradient"])
def test_an_exception_in_the_backward_of_one_rank_is_the_reason_given_by_the_others(late: bool) -> None:
    other, own = run_processes(raises_in_backward, 2, late)
    assert own == ("ValueError", "out of ideas")
    assert other[0] == "PeerLost", other
    assert "rank 1 withdrew: its backward pass raised ValueError: out of ideas" in other[1]


def fails_alone() -> Error:
    dist, rank = connect()
    if rank == 1:
        raise ValueError("an error of the script")
    return error_of(dist.barrier)


def test_a_script_that_raises_is_named_by_the_others() -> None:
    waiting, raising = start_processes(fails_alone, 2, fresh=True)
    assert "an error of the script" in raising.stderr
    assert waiting.value[0] == "PeerLost"
    assert "waited for rank 1" in waiting.value[1]


def other_collective_in_backward() -> Error:
    dist, rank = connect()
    backward = backward_of(None)
    return error_of(backward if rank == 0 else dist.barrier)


def test_a_mismatch_keeps_its_type_through_backward() -> None:
    for kind, message in run_processes(other_collective_in_backward, 2):
        assert kind == "MismatchedCollective"
        assert "rank 0: gradient averaging of 1 buckets" in message
        assert "rank 1: barrier" in message


def stopped(in_backward: bool) -> Error:
    """Rank 1 stops itself; rank 0 waits for it in vain, then lets it go on."""
    dist, rank = connect(20 if in_backward else 120)
    store = dist.distributed_c10d._get_default_store()
    error = ("", "")
    wait = backward_of(None) if in_backward else lambda: dist.barrier(timeout=timedelta(seconds=1))
    if rank == 0:
        process = int(store.get("process"))
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        error = error_of(wait)
        os.kill(process, signal.SIGCONT)
    else:
        store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    meet("over", rank, 2)
    return error if rank == 0 else error_of(dist.barrier)


@pytest.mark.parametrize("in_backward", [False, True], ids=["in_a_collective", "in_backward"])
def test_a_stopped_rank_is_named_when_the_timeout_is_over(in_backward: bool) -> None:
    waited, resumed = run_processes(stopped, 2, in_backward)
    assert waited[0] == "Timeout"
    assert "waited for rank 1: nothing came for" in waited[1]
    assert resumed[0] == "PeerLost"
    assert "rank 0 failed" in resumed[1]


def timeout_of_one_call() -> Error:
    dist, rank = connect()
    error = error_of(lambda: dist.barrier(timeout=timedelta(milliseconds=300))) if rank == 0 else ("", "")
    meet("over", rank, 2)
    return error if rank == 0 else error_of(dist.barrier)


def test_a_call_may_have_a_timeout_of_its_own() -> None:
    waited, late = run_processes(timeout_of_one_call, 2)
    assert waited[0] == "Timeout"
    assert "on rank 0 waited for rank 1" in waited[1]
    assert late[0] == "PeerLost"


def interrupt_when_in(function: str) -> None:
    """Sends this process Ctrl-C as soon as its main thread is inside ``function``."""
    main = threading.main_thread().ident
    assert main is not None

    def inside() -> bool:
        frame = sys._current_frames()[main]
        return frame.f_code.co_name == function

    def watch() -> None:
        while not inside():
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def interrupted(in_backward: bool) -> Error:
    dist, rank = connect()
    error = ("", "")
    wait = backward_of(None) if in_backward else dist.barrier
    if rank == 0:
        interrupt_when_in("backward_ended" if in_backward else "barrier")
        error = error_of(wait)
    meet("over", rank, 2)
    return error if rank == 0 else error_of(dist.barrier)


@pytest.mark.parametrize("in_backward", [False, True], ids=["in_a_collective", "in_backward"])
def test_ctrl_c_ends_a_wait_and_the_others_learn_of_it(in_backward: bool) -> None:
    own, other = run_processes(interrupted, 2, in_backward, finalize=True)
    assert own[0] == "KeyboardInterrupt"
    assert other[0] == "PeerLost"
    assert "rank 0" in other[1]


def left_early() -> Error:
    dist, rank = connect()
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return "nothing", ""
    return error_of(dist.barrier)


def test_a_rank_that_has_left_is_named() -> None:
    (kind, message), _ = run_processes(left_early, 2)
    assert kind == "PeerLost"
    assert "waited for rank 1: rank 1 has left the group" in message


def after_fork() -> Error:
    """What a collective in a forked child raises; the parent's group goes on."""
    import torch

    dist, _ = connect()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, "\n".join(error_of(lambda: dist.all_reduce(torch.ones(2)))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    kind, message = os.read(reading, 4096).decode().split("\n", 1)
    dist.barrier()
    return kind, message


def test_a_forked_child_is_told_that_the_group_did_not_come_along() -> None:
    for kind, message in run_processes(after_fork, 2):
        assert kind == "InvalidArgument"
        assert "create a new group in the child" in message


def resources() -> tuple[int, int]:
    """Open descriptors of this process and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    assert "/dev/shm/" not in maps
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:")


def many_groups(count: int) -> list[tuple[int, int]]:
    import gc

    import torch
    import torch.distributed as dist

    from accelerate_cpp import shared_empty
    from accelerate_cpp.comm.backend import register
    from accelerate_cpp.parallel.bundle import Bundle
    from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy

    register()
    store, rank, size = next(dist.rendezvous("env://"))
    used = []
    for number in range(count):
        dist.init_process_group("cpu:shm", store=dist.PrefixStore(str(number), store), rank=rank, world_size=size)
        strategy = DataParallelStrategy(torch.device("cpu"), {})
        model = strategy.prepare(Bundle(models=[torch.nn.Linear(300, 300)])).models[0]
        strategy.backward(model(torch.ones(2, 300)).sum())
        dist.all_reduce(torch.ones(300_000))
        shared = shared_empty([300_000], dtype=torch.float32)
        dist.all_reduce(shared)
        del model, strategy, shared
        dist.destroy_process_group()
        gc.collect()
        used.append(resources())
    return used


def test_twenty_groups_leave_no_descriptor_and_no_memory() -> None:
    for used in run_processes(many_groups, 2, 20):
        descriptors, mappings = zip(*used, strict=True)
        assert max(descriptors) == descriptors[0]
        assert set(mappings) == {0}


def sum_of_ranks(offset: int) -> list[float]:
    import torch

    dist, rank = connect()
    sums = []
    for step in range(50):
        data = torch.tensor([float(rank + offset + step)])
        dist.all_reduce(data)
        sums.append(data.item())
    dist.destroy_process_group()
    return sums


def test_two_jobs_at_once_do_not_meet() -> None:
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(run_processes, sum_of_ranks, 2, offset) for offset in (0, 1000)]
        first, second = (job.result() for job in jobs)
    assert first == [[1.0 + 2 * step for step in range(50)]] * 2
    assert second == [[2001.0 + 2 * step for step in range(50)]] * 2
