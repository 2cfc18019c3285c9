"""Asynchronous operations of backend shm through torch.distributed, in real processes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest

from processes import run_processes
from shm_scenarios import ShmScenarios, check, meet, operand, refused, register, report, tell, wait_for

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = ShmScenarios()


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=(2, 3))
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@SCENARIOS.add
def operations_run_in_the_order_of_issue_whatever_is_waited_for(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.ones(1000)
    works = [dist.all_reduce(data, async_op=True) for _ in range(6)]
    works[3 if rank == 0 else 5].wait()
    dist.broadcast(data, 0)
    assert all(work.is_completed() and work.is_success() for work in works)
    check(data, torch.full((1000,), float(size**6)))


@SCENARIOS.add
def every_operation_can_be_asynchronous(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    own, everyone = operand(rank, 1000, "float32"), [operand(peer, 1000, "float32") for peer in range(size)]
    gathered, whole, scattered = [torch.empty(1000) for _ in range(size)], torch.empty(1000 * size), torch.empty(1000)
    at_root, part, row = [torch.empty(1000) for _ in range(size)], torch.empty(1000), torch.empty(size, 1000)
    sent, root_sum, shared = own.clone(), own.clone(), own.clone()
    works = [
        dist.all_gather(gathered, own, async_op=True),
        dist.all_gather_into_tensor(whole, own, async_op=True),
        dist.reduce_scatter_tensor(part, torch.cat(everyone), async_op=True),
        dist.scatter(scattered, everyone if rank == 1 else None, src=1, async_op=True),
        dist.gather(own, at_root if rank == 0 else None, dst=0, async_op=True),
        dist.all_to_all_single(row, torch.stack([own] * size), async_op=True),
        dist.reduce(root_sum, 0, async_op=True),
        dist.broadcast(shared, 1, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        assert work.wait()
    check(gathered, everyone)
    check(whole, torch.cat(everyone))
    check(part, size * everyone[rank])
    check(scattered, own)
    check(row, torch.stack(everyone))
    check(root_sum, torch.stack(everyone).sum(0) if rank == 0 else sent)
    check(shared, everyone[1])
    if rank == 0:
        check(at_root, everyone)


@SCENARIOS.add
def futures_complete_by_themselves_and_run_callbacks(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    total = float(size * (size + 1) / 2)
    data = torch.full((3,), float(rank + 1))
    doubled = dist.all_reduce(data, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    check(doubled.wait(), torch.full((3,), 2 * total))
    parts = [torch.empty(2) for _ in range(size)]
    check(dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True).get_future().wait()[-1], parts[-1])
    check(parts[-1], torch.full((2,), float(size - 1)))
    seen = threading.Event()
    future = dist.all_reduce(data, async_op=True).get_future()
    future.add_done_callback(lambda done: seen.set())
    assert seen.wait(120), "nobody has waited for it, and it has not run"
    assert future.done()


@SCENARIOS.add
def polling_is_enough(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.ones(300_000)
    work = dist.all_reduce(data, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    check(data, torch.full((300_000,), float(size)))
    assert work.result()[0].data_ptr() == data.data_ptr()


@SCENARIOS.add
def tensors_live_until_their_operation_has_ended_and_no_longer(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    output = torch.zeros(size * 300_000)
    storage = torch.full((300_000,), float(rank))
    alive = weakref.ref(storage)
    dist.all_gather_into_tensor(output, storage, async_op=True)
    del storage
    dist.barrier()
    gc.collect()
    check(output, torch.arange(size).repeat_interleave(300_000).float())
    assert alive() is None


@SCENARIOS.add
def results_go_into_strided_tensors_that_autograd_knows(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    parameter = torch.nn.Parameter(torch.full((4, 3), float(rank)))
    work = dist.broadcast(parameter.t(), 1, async_op=True)
    work.get_future().wait()
    check(parameter.detach(), torch.ones(4, 3))
    assert parameter.is_leaf
    with torch.inference_mode():
        inferred = torch.full((4, 3), float(rank)).t()
        work = dist.all_reduce(inferred, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    check(inferred.clone(), torch.full((3, 4), size * (size - 1) / 2))


@SCENARIOS.add
def threads_may_wait_for_the_same_operations(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = [torch.full((1000,), float(rank)) for _ in range(30)]
    works = [dist.all_reduce(part, async_op=True) for part in data]
    threads = [threading.Thread(target=lambda k=k: [work.wait() for work in works[k::2] + works]) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(torch.stack(data), torch.full((30, 1000), size * (size - 1) / 2))


@SCENARIOS.add
def a_wait_may_end_before_its_operation(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank > 0:
        wait_for("rank 0 has given up")
    data = torch.ones(3)
    work = dist.all_reduce(data, async_op=True)
    if rank == 0:
        with refused("Timeout", "it goes on, and can be waited for again"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        tell("rank 0 has given up")
    assert work.wait(timedelta(seconds=120))
    check(data, torch.full((3,), float(size)))


@SCENARIOS.add
def functional_collectives_run_in_their_turn(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    data = torch.full((5,), float(rank + 1))
    summed = functional.all_reduce(data, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(data, 0, dist.group.WORLD)
    swapped = functional.all_to_all_single(torch.arange(size) + 10 * rank, None, None, dist.group.WORLD)
    check(gathered + 0, torch.arange(1, size + 1).repeat_interleave(5).float())
    check(summed + 0, torch.full((5,), size * (size + 1) / 2))
    check(swapped + 0, 10 * torch.arange(size) + rank)


@SCENARIOS.add
def errors_keep_their_type_wherever_they_come_out(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    def mine() -> Any:
        return torch.ones(4 + rank)

    with refused("MismatchedCollective", "[4]"):
        dist.all_reduce(mine(), async_op=True).wait()
    with refused("MismatchedCollective", "[4]"):
        dist.all_reduce(mine(), async_op=True).get_future().wait()
    with refused("MismatchedCollective", "[4]"):
        functional.all_reduce(mine(), "sum", dist.group.WORLD) + 0
    with refused("MismatchedCollective", "[4]"):
        torch.ops._c10d_functional.wait_tensor(functional.all_reduce(mine(), "sum", dist.group.WORLD).elem)
    with refused("InvalidArgument", "UInt16"):
        functional.all_reduce(mine().to(torch.uint16), "sum", dist.group.WORLD)
    work = dist.all_reduce(mine(), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert not work.is_success()
    data = torch.ones(2)
    dist.all_reduce(data)
    check(data, torch.full((2,), float(size)))


@SCENARIOS.add
def errors_keep_their_type_through_torchs_wrapper(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    loss = model(torch.ones(3, 4)).sum()
    if rank == 0:
        with refused("Timeout", "rank 1"):
            dist.group.WORLD.monitored_barrier(timedelta(milliseconds=50))
        tell("the group has failed")
    else:
        wait_for("the group has failed")
    with refused("PeerLost", "rank 0"):
        loss.backward()


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert not report(failures, name), report(failures, name)


def interrupted(helping: bool) -> str:
    """What rank 0 sees when it is interrupted while it waits; rank 1 comes afterwards."""
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    rank = dist.get_rank()
    found = "nothing"
    meet("both are there", rank, 2)
    if rank == 0:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        if not helping:
            works[-1].get_future()  # the thread runs them
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            works[-1].wait()
        except BaseException as error:
            found = type(error).__name__
        tell("interrupted")
    wait_for("interrupted")
    meet("both have seen it", rank, 2)
    dist.distributed_c10d._abort_process_group()
    return found


@pytest.mark.parametrize("helping", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ctrl_c_ends_a_wait_whoever_runs_the_operation(helping: bool) -> None:
    assert run_processes(interrupted, 2, helping, finalize=True)[0] == "KeyboardInterrupt"


def ended_within_a_callback(in_time: bool) -> bool:
    """Ends the program while a callback of a group that is gone runs; `in_time` or in an operation that never ends."""
    import torch

    stores = []
    atexit.register(lambda: [store.set("rank 0 waits for nothing any more", "") for store in stores])
    dist = register()  # ends its threads in a handler of its own, which is called before this one
    dist.init_process_group("cpu:shm")
    rank = dist.get_rank()
    begun = threading.Event()

    def callback(future: object) -> None:
        begun.set()
        time.sleep(0.5)  # until after the program has ended, if nothing waits for this

    if in_time or rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True).get_future().add_done_callback(callback)
    if in_time:
        begun.wait()
        meet("both callbacks have begun", rank, 2)
        dist.distributed_c10d._abort_process_group()
    else:
        # Gone without abort or shutdown, as when the program drops it.
        store = dist.distributed_c10d._get_default_store()
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d._update_default_pg(None)
        if rank == 0:
            stores.append(store)
        else:
            store.wait(["rank 0 waits for nothing any more"], timedelta(seconds=60))
    return begun.is_set()


@pytest.mark.parametrize("in_time", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_program_ends_well_while_threads_of_a_group_that_is_gone_run(in_time: bool) -> None:
    assert run_processes(ended_within_a_callback, 2, in_time, fresh=True) == [in_time] * 2


def destroyed_with_work() -> list[float]:
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    data = torch.ones(300_000)
    dist.all_reduce(data, async_op=True)
    dist.destroy_process_group()
    return data[[0, -1]].tolist()


def test_destroying_a_group_finishes_its_operations() -> None:
    assert run_processes(destroyed_with_work, 2, finalize=True) == [[2.0, 2.0]] * 2


def forked_with_work() -> str:
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    work = dist.all_reduce(torch.ones(4), async_op=True)
    meet("both have issued it", dist.get_rank(), 2)
    reading, writing = os.pipe()
    if os.fork() == 0:
        found = []
        for call in (work.wait, lambda: dist.all_reduce(torch.ones(4), async_op=True), lambda: dist.barrier()):
            try:
                call()
                found.append("nothing")
            except Exception as error:
                found.append(type(error).__name__)
        os.write(writing, " ".join(found).encode())
        os._exit(0)
    os.wait()
    work.wait()
    dist.destroy_process_group()
    return os.read(reading, 1000).decode()


def test_a_forked_child_is_told_that_the_group_is_its_parents() -> None:
    for found in run_processes(forked_with_work, 2):
        wait, asynchronous, synchronous = found.split()
        assert wait in ("InvalidArgument", "nothing"), "the operation may have ended before the fork"
        assert (asynchronous, synchronous) == ("InvalidArgument", "InvalidArgument")
