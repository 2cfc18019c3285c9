"""Sends and receives of backend shm through torch.distributed, in real processes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest

from processes import run_processes, start_processes
from shm_scenarios import DTYPES, ShmScenarios, check, meet, operand, refused, register, report

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = ShmScenarios()
# At once, through a block of shared memory, and more than a rank has for one message.
COUNTS = (0, 1, 1000, 300_001)


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=(2, 3))
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@SCENARIOS.add
def messages_of_every_dtype_and_size_go_around_a_ring(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in (*DTYPES, "uint16", "complex64", "float8_e5m2"):
        for count in COUNTS:
            values = operand(rank, count, "float32" if dtype not in DTYPES else dtype).to(getattr(torch, dtype))
            received = torch.zeros(2 * count, dtype=values.dtype)[::2]
            work = dist.isend(values, (rank + 1) % size, tag=count)
            assert dist.recv(received, (rank - 1) % size, tag=count) == (rank - 1) % size
            work.wait()
            before = operand((rank - 1) % size, count, "float32" if dtype not in DTYPES else dtype)
            check(received.to(torch.complex64), before.to(torch.complex64))


@SCENARIOS.add
def all_ranks_may_send_first(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for count in COUNTS:
        for peer in range(size):
            if peer != rank:
                dist.send(operand(rank, count, "float32"), peer)
        for peer in range(size):
            if peer != rank:
                received = torch.zeros(count)
                dist.recv(received, peer)
                check(received, operand(peer, count, "float32"))


@SCENARIOS.add
def tags_are_received_in_any_order(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank > 0:
        for tag in (5, 3, 5, 4):
            dist.send(torch.tensor([rank, tag]), 0, tag=tag)
        return
    for tag in (4, 5, 3, 5):
        for peer in range(1, size):
            received = torch.zeros(2, dtype=torch.int64)
            dist.recv(received, peer, tag=tag)
            check(received, torch.tensor([peer, tag]))


@SCENARIOS.add
def a_receive_from_anybody_tells_who_it_was(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank > 0:
        dist.send(torch.tensor([float(rank)]), 0)
        return
    sources = []
    for _ in range(1, size):
        received = torch.zeros(1)
        sources.append(dist.recv(received))
        check(received, torch.tensor([float(sources[-1])]))
    assert sorted(sources) == list(range(1, size))


@SCENARIOS.add
def batches_are_independent_of_the_order_of_their_operations(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    received = [torch.zeros(100_000) for _ in range(size)]
    operations = []
    for peer in reversed(range(size)) if rank % 2 else range(size):
        if peer != rank:
            operations += [dist.P2POp(dist.irecv, received[peer], peer)]
            operations += [dist.P2POp(dist.isend, operand(rank, 100_000, "float32"), peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer in range(size):
        if peer != rank:
            check(received[peer], operand(peer, 100_000, "float32"))


@SCENARIOS.add
def a_batch_that_fails_does_not_silence_the_group(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    two = torch.zeros(1)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert not backend.supports_coalescing
    with refused("InvalidArgument", "is not another rank of this group"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, two, group_peer=rank)])
    data = torch.ones(1)
    dist.all_reduce(data)
    check(data, torch.full((1,), float(size)))


@SCENARIOS.add
def transfers_complete_while_nobody_waits(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    received, sent = torch.zeros(300_001), operand(rank, 300_001, "float32")
    works = [dist.irecv(received, (rank - 1) % size), dist.isend(sent, (rank + 1) % size)]
    for work in works:
        while not work.is_completed():
            time.sleep(0.001)
        assert work.is_success()
    check(received, operand((rank - 1) % size, 300_001, "float32"))
    future = dist.irecv(received, (rank - 1) % size).get_future()
    dist.isend(2 * sent, (rank + 1) % size)
    check(future.wait()[0], 2 * operand((rank - 1) % size, 300_001, "float32"))


@SCENARIOS.add
def a_message_arrives_although_a_collective_is_under_way(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    # Rank 0's collective waits for the others, which come when they have its message.
    data, message = torch.ones(4), torch.full((300_001,), float(rank))
    if rank == 0:
        collective = dist.all_reduce(data, async_op=True)
        collective.get_future()
        works = [dist.isend(message, peer) for peer in range(1, size)]
        collective.wait()
        for work in works:
            work.wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(data)
    check(message[[0, -1]], torch.zeros(2))
    check(data, torch.full((4,), float(size)))


@SCENARIOS.add
def objects_are_sent_and_received(rank: int, size: int) -> None:
    import torch.distributed as dist

    if rank == 0:
        dist.send_object_list([{"text": "x" * 100_000}, None], 1)
    elif rank == 1:
        received = [None, "something"]
        dist.recv_object_list(received, 0)
        assert received == [{"text": "x" * 100_000}, None]


@SCENARIOS.add
def a_message_of_another_size_is_a_mismatch_for_both_and_the_group_goes_on(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.send(torch.ones(4), 1)
        with refused("MismatchedCollective", "rank 0 sent 4 float32 with tag 0, but rank 1 received 5 float32"):
            dist.recv(torch.ones(4), 1)
    if rank == 1:
        with refused("MismatchedCollective", "4 float32"):
            dist.recv(torch.ones(5), 0)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        received = torch.zeros(4)
        dist.recv(received, 0)
        check(received, torch.ones(4))


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert not report(failures, name), report(failures, name)


def reversed_tags(backend: str, count: int, num_messages: int) -> list[bool]:
    import torch

    dist = register()
    dist.init_process_group(backend, timeout=timedelta(seconds=100))
    tags = range(num_messages)
    if dist.get_rank() == 0:
        sent = [torch.full((count,), tag, dtype=torch.int64) for tag in tags]
        works = [dist.isend(data, 1, tag=tag) for tag, data in zip(tags, sent, strict=True)]
        meet("all are posted", 0, 2)
        for work in works:
            work.wait()
        return []
    meet("all are posted", 1, 2)
    right = []
    received = torch.zeros(count, dtype=torch.int64)
    for tag in reversed(tags):
        dist.recv(received, 0, tag=tag)
        right.append(bool((received == tag).all()))
    return right


@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
@pytest.mark.parametrize(("count", "num_messages"), [(1, 200), (1, 3000), ((130 << 20) // 8, 2)])
def test_messages_are_received_in_the_reverse_order_however_many_and_large(
    backend: str, count: int, num_messages: int
) -> None:
    assert run_processes(reversed_tags, 2, backend, count, num_messages)[1] == [True] * num_messages


def all_send_before_any_receives(count: int, num_messages: int) -> bool:
    """With calls that block until the message is on its way."""
    import torch

    dist = register()
    dist.init_process_group("cpu:shm", timeout=timedelta(seconds=100))
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(num_messages):
        dist.send(torch.full((count,), 10 * rank + number), (rank + 1) % size)
    received = torch.zeros(count, dtype=torch.int64)
    right = True
    for number in range(num_messages):
        dist.recv(received, (rank - 1) % size)
        right = right and bool((received == 10 * ((rank - 1) % size) + number).all())
    return right


@pytest.mark.parametrize(("size", "count", "num_messages"), [(2, 1, 3000), (2, (130 << 20) // 8, 3), (3, 8 << 20, 6)])
def test_all_ranks_may_send_first_up_to_the_memory_of_the_host(size: int, count: int, num_messages: int) -> None:
    assert run_processes(all_send_before_any_receives, size, count, num_messages) == [True] * size


def killed(waiting: bool) -> tuple[str, str]:
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.irecv(torch.zeros(4), 1)
    while not waiting and not work.is_completed():
        time.sleep(0.001)
    try:
        work.wait()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("waiting", [True, False])
def test_a_receive_from_a_rank_that_dies_raises(waiting: bool) -> None:
    kind, message = start_processes(killed, 2, waiting)[0].value
    assert kind == "PeerLost"
    assert "rank 1" in message


def sent_before_the_end() -> list[float]:
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    rank = dist.get_rank()
    received = torch.zeros(300_001)
    if rank == 0:
        dist.isend(torch.ones(300_001), 1)
        meet("rank 1 may go on", rank, 2)
        return []
    meet("rank 1 may go on", rank, 2)
    dist.recv(received, 0)
    return received[[0, -1]].tolist()


def test_a_message_on_its_way_outlives_its_sender() -> None:
    assert run_processes(sent_before_the_end, 2, finalize=True)[1] == [1.0, 1.0]
