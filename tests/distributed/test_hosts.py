"""Ranks on two hosts: two network namespaces with shared memory in each and Gloo between them, in real processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from network_namespaces import ADDRESSES, Host
from processes import Outcome, run_processes, start_processes
from scenarios import outlive_the_others

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Layout = tuple[int, ...]
Scenario = Callable[["Ranks"], None]
SCENARIOS: dict[str, Scenario] = {}
# Ranks one host after the other, dealt out in turn, and unevenly. LOCAL_WORLD_SIZE says 4 in all of them.
LAYOUTS: tuple[Layout, ...] = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1))
TIMEOUT = timedelta(seconds=120)


class Ranks:
    """This process's place in a group of all ranks with backend shm."""

    def __init__(self, hosts: tuple[Host, Host], layout: Layout, rank: int) -> None:
        self.hosts, self.layout, self.rank, self.size = hosts, layout, rank, len(layout)


def scenario(function: Scenario) -> Scenario:
    """Called on every rank; its name is the sentence that must hold."""
    SCENARIOS[function.__name__] = function
    return function


def join(hosts: tuple[Host, Host], layout: Layout) -> tuple[Any, Any, int, int]:
    """Goes to this rank's host and meets the others. Returns (torch.distributed, store, rank, size)."""
    hosts[layout[int(os.environ["RANK"])]].enter()
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    return dist, *next(dist.rendezvous("env://", timeout=TIMEOUT))


def run_scenarios(hosts: tuple[Host, Host], layout: Layout) -> dict[str, str]:
    """The traceback of every scenario that failed on this rank. Each has a group of its own, so that it fails alone."""
    dist, store, rank, size = join(hosts, layout)
    failures = {}
    for name, function in SCENARIOS.items():
        own = {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": size}
        dist.init_process_group("cpu:shm", timeout=TIMEOUT, **own)
        try:
            function(Ranks(hosts, layout, rank))
        except Exception:
            failures[name] = traceback.format_exc()
        dist.destroy_process_group()
    outlive_the_others(store, rank, size)
    return failures


ENVIRONMENT = {"MASTER_ADDR": ADDRESSES[0]}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def failures(request: pytest.FixtureRequest, hosts: tuple[Host, Host]) -> list[dict[str, str]]:
    return run_processes(run_scenarios, 4, hosts, request.param, timeout=300, environment=ENVIRONMENT)


def operand(rank: int, count: int, dtype: str) -> Any:
    """Small positive integers, exact in every dtype whatever the order of summation."""
    import torch

    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(getattr(torch, dtype))


def total(size: int, count: int, dtype: str) -> Any:
    return sum(operand(rank, count, dtype) for rank in range(size))


def check(actual: Any, expected: Any) -> None:
    import torch

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@scenario
def the_hosts_are_told_apart_whatever_the_environment_says(ranks: Ranks) -> None:
    import torch.distributed as dist

    from accelerate_cpp.comm.hosts import find_hosts

    assert os.environ["LOCAL_WORLD_SIZE"] == "4"
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    assert find_hosts(store, ranks.rank, ranks.size) == list(ranks.layout)


@scenario
def all_reduce_is_exact(ranks: Ranks) -> None:
    import torch.distributed as dist

    for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "int64", "uint8"):
        for count in (1, 1000, 700_001):
            data = operand(ranks.rank, count, dtype)
            dist.all_reduce(data)
            check(data, total(ranks.size, count, dtype))
    for op, expected in (("MAX", 4), ("MIN", 1), ("PRODUCT", 24), ("AVG", 2.5)):
        data = operand(0, 1, "float32") * (ranks.rank + 1)
        dist.all_reduce(data, op=getattr(dist.ReduceOp, op))
        check(data, operand(0, 1, "float32") * expected)


@scenario
def blocks_reach_the_rank_that_they_are_for(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    rank, size = ranks.rank, ranks.size
    for count in (3, 400_001):
        everything = torch.cat([operand(peer, count, "float32") for peer in range(size)])
        gathered = torch.empty(size * count)
        dist.all_gather_into_tensor(gathered, operand(rank, count, "float32"))
        check(gathered, everything)
        scattered = torch.empty(count)
        dist.reduce_scatter_tensor(scattered, everything * (rank + 1))
        check(scattered, operand(rank, count, "float32") * 10)
        exchanged = torch.empty(size * count)
        dist.all_to_all_single(exchanged, everything * (rank + 1))
        check(exchanged, torch.cat([operand(rank, count, "float32") * (peer + 1) for peer in range(size)]))
    for root in range(size):
        data = operand(rank, 100, "int32")
        dist.broadcast(data, root)
        check(data, operand(root, 100, "int32"))
        parts = [torch.empty(10) for _ in range(size)] if rank == root else None
        dist.gather(operand(rank, 10, "float32"), parts, dst=root)
        for peer, part in enumerate(parts or ()):
            check(part, operand(peer, 10, "float32"))
        dist.scatter(data[:5], [operand(peer, 5, "int32") for peer in range(size)] if rank == root else None, src=root)
        check(data[:5], operand(rank, 5, "int32"))


@scenario
def objects_of_any_size_are_gathered(ranks: Ranks) -> None:
    import torch.distributed as dist

    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, "x" * 1000 * ranks.rank)
    assert found == ["x" * 1000 * peer for peer in range(ranks.size)]


@scenario
def messages_travel_within_and_between_hosts(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    for count in (3, 100_000):
        for distance in (1, 2, 3):
            destination, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
            work = dist.isend(operand(ranks.rank, count, "float32"), destination, tag=distance)
            data = torch.empty(count)
            dist.recv(data, source, tag=distance)
            work.wait()
            check(data, operand(source, count, "float32"))


@scenario
def a_message_may_come_from_any_rank_of_any_host(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    if ranks.rank == 0:
        data = torch.empty(1)
        sources = []
        for _ in range(3):
            sources.append(dist.recv(data))
            check(data, torch.tensor([10.0 * sources[-1]]))
        assert sorted(sources) == [1, 2, 3]
    else:
        dist.send(torch.tensor([10.0 * ranks.rank]), 0)


@scenario
def a_rank_that_leaves_keeps_no_other_from_sending(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(range(ranks.size), backend="shm")
    data = torch.tensor([10.0 * ranks.rank])
    if ranks.rank == 0:
        assert dist.recv(data, group=group) == 3
        waiting = dist.irecv(data, group=group)
        store.set("waiting", "")
        waiting.wait()
        check(data, torch.tensor([10.0]))
        store.set("received", "")
        assert dist.recv(data, group=group) == 2
        check(data, torch.tensor([20.0]))
    elif ranks.rank == 3:
        dist.send(data, 0, group=group)
        store.wait(["waiting"], TIMEOUT)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        store.set("gone", "")
    else:
        store.wait(["gone" if ranks.rank == 1 else "received"], TIMEOUT)
        dist.send(data, 0, group=group)


@scenario
def a_rank_that_has_left_is_not_waited_for_though_its_connections_are_open(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.errors import PeerLost

    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(range(ranks.size), backend="shm")
    if ranks.rank == 0:
        with pytest.raises(PeerLost, match="rank 3 on rank 0: rank 3 has left the group"):
            dist.recv(torch.empty(1), 3, group=group)
        with pytest.raises(PeerLost, match="send to rank 3 on rank 0: it has left the group"):
            dist.send(torch.ones(1), 3, group=group)
        store.set("refused", "")
    elif ranks.rank == 3:
        held = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        store.wait(["refused"], TIMEOUT)
        del held


@scenario
def groups_of_some_ranks_work_beside_each_other(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    for members in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 1, 0]):
        group = dist.new_group(members, backend="shm")
        if ranks.rank in members:
            data = torch.tensor([float(ranks.rank)])
            dist.all_reduce(data, group=group)
            assert data.item() == sum(members)


@scenario
def a_mismatch_raises_on_every_rank_with_a_table(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.errors import MismatchedCollective

    with pytest.raises(MismatchedCollective) as caught:
        dist.all_reduce(torch.ones(4 if ranks.rank == 3 else 5))
    for rank in range(ranks.size):
        shape = 4 if rank == 3 else 5
        assert re.search(
            rf"rank {rank}: all_reduce\(sum\) of \[{shape}\] float32.*test_hosts.py:\d+", str(caught.value)
        )
    data = torch.ones(2)
    dist.all_reduce(data)
    check(data, torch.full((2,), 4.0))


@scenario
def ranks_of_a_part_of_all_are_called_by_their_numbers_among_all(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.errors import MismatchedCollective

    group = dist.new_group([1, 2, 3], backend="shm")
    if ranks.rank == 0:
        return
    with pytest.raises(MismatchedCollective) as caught:
        dist.all_reduce(torch.ones(4 if ranks.rank == 3 else 5), group=group)
    assert re.findall(r"^  rank (\d)", str(caught.value), re.MULTILINE) == ["1", "2", "3"]
    if ranks.rank == 1:
        dist.send(torch.ones(4), 3, group)
    if ranks.rank == 3:
        with pytest.raises(MismatchedCollective, match=r"^rank 1 sent 4 float32 .* from rank 1 .* on rank 3"):
            dist.recv(torch.ones(5), 1, group)


@scenario
def an_all_reduce_crosses_the_network_once_in_each_direction(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    def sent(operation: Callable[[], None]) -> int:
        dist.barrier()
        before = sum(host.bytes_sent() for host in ranks.hosts)
        dist.barrier()
        operation()
        dist.barrier()
        return sum(host.bytes_sent() for host in ranks.hosts) - before

    size_bytes = 8 << 20
    data = torch.ones(size_bytes // 4)
    silence = sent(lambda: None)
    moved = sent(lambda: dist.all_reduce(data)) - silence
    assert 2 * size_bytes <= moved < 2 * size_bytes * 1.05, f"{moved} bytes crossed the network"
    group, _ = dist.new_subgroups_by_enumeration(
        [[rank for rank in range(ranks.size) if ranks.layout[rank] == host] for host in (0, 1)], backend="shm"
    )
    moved = sent(lambda: dist.all_reduce(data, group=group)) - silence
    assert moved < size_bytes / 100, f"{moved} bytes crossed the network"


def trained(wrap: Callable[[Any], Any], inputs: Any, targets: Any) -> list[Any]:
    """The parameters after three steps on these examples, from weights that are the same everywhere."""
    import torch

    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@scenario
def training_on_two_hosts_equals_training_in_one_process(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.parallel.data_parallel import DataParallel

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 4 * ranks.size, 6, generator=generator)
    targets = torch.randn(3, 4 * ranks.size, 2, generator=generator)
    own = slice(4 * ranks.rank, 4 * (ranks.rank + 1))
    expected = trained(lambda model: model, inputs, targets)
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    wrappers: list[Callable[[Any], Any]] = [
        torch.nn.parallel.DistributedDataParallel,
        lambda model: DataParallel(model, backend.communicator, TIMEOUT),
    ]
    for wrap in wrappers:
        found = trained(wrap, inputs[:, own], targets[:, own])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for parameter in found:
            first = parameter.clone()
            dist.broadcast(first, 0)
            check(parameter, first)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_hosts(name: str, failures: list[dict[str, str]]) -> None:
    failed = {rank: report[name] for rank, report in enumerate(failures) if name in report}
    assert not failed, "".join(f"\n--- rank {rank}\n{report}" for rank, report in failed.items())


def reduce_until_one_dies(hosts: tuple[Host, Host], layout: Layout, victim: int) -> tuple[str, str]:
    """``victim`` is killed between two of many operations. Returns what the others raise: its type and its text."""
    import torch

    dist, store, rank, size = join(hosts, layout)
    dist.init_process_group("cpu:shm", store=store, rank=rank, world_size=size)
    data = torch.ones(1000)
    try:
        for step in range(1_000_000):
            if rank == victim and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(data, op=dist.ReduceOp.MAX)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    assert outcomes[victim].exit_code == -signal.SIGKILL
    return [outcome for outcome in outcomes if outcome.rank != victim]


def test_a_killed_rank_that_is_alone_on_its_host_is_named(hosts: tuple[Host, Host]) -> None:
    outcomes = start_processes(reduce_until_one_dies, 2, hosts, (0, 1), 1, timeout=300, environment=ENVIRONMENT)
    (survivor,) = survivors(outcomes, 1)
    assert survivor.value is not None, survivor.stderr
    kind, text = survivor.value
    assert kind == "PeerLost", text
    assert ": rank 1 was lost: " in text, text
    assert "This is typically caused" not in text, text


# A rank that is not its host's leader, the leader of a host, and the rank whose process serves the store.
@pytest.mark.parametrize("victim", [3, 2, 0])
def test_a_killed_rank_raises_peer_lost_on_both_hosts(hosts: tuple[Host, Host], victim: int) -> None:
    outcomes = start_processes(
        reduce_until_one_dies, 4, hosts, LAYOUTS[0], victim, timeout=300, environment=ENVIRONMENT
    )
    for outcome in survivors(outcomes, victim):
        assert outcome.value is not None, outcome.stderr
        kind, text = outcome.value
        assert kind == "PeerLost", text
        assert "has ended" in text or " was lost: " in text, text


def interrupt_one(hosts: tuple[Host, Host], layout: Layout) -> str:
    """Rank 2 waits for ranks that do not come yet, and is interrupted. Returns what each rank raises."""
    import threading

    import torch

    dist, store, rank, size = join(hosts, layout)
    dist.init_process_group("cpu:shm", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 2:
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    try:
        if rank != 2:
            store.wait(["interrupted"], TIMEOUT)
        dist.all_reduce(torch.ones(3))
    except (KeyboardInterrupt, Exception) as error:
        if rank == 2:
            store.set("interrupted", "")
        outlive_the_others(store, rank, size)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_interrupt_ends_a_wait_and_tells_both_hosts(hosts: tuple[Host, Host]) -> None:
    raised = run_processes(interrupt_one, 4, hosts, LAYOUTS[0], environment=ENVIRONMENT)
    assert raised[2].startswith("KeyboardInterrupt"), raised[2]
    for rank in (0, 1, 3):
        assert raised[rank].startswith("PeerLost"), raised[rank]


def connect_by_default(hosts: tuple[Host, Host], layout: Layout) -> str:
    """What ``Accelerator`` uses on these hosts."""
    hosts[layout[int(os.environ["RANK"])]].enter()
    import torch
    import torch.distributed as dist

    from accelerate_cpp.comm.process_group import connect

    connect(device_type="cpu")
    data = torch.ones(1)
    dist.all_reduce(data)
    assert data.item() == len(layout)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    backend = str(dist.get_backend_config())
    dist.destroy_process_group()
    outlive_the_others(store, rank, len(layout))
    return backend


@pytest.mark.parametrize("layout", [(0, 1, 1), (0, 1)], ids=str)
def test_the_default_backend_finds_the_way_between_hosts(hosts: tuple[Host, Host], layout: Layout) -> None:
    found = run_processes(connect_by_default, len(layout), hosts, layout, environment=ENVIRONMENT)
    assert all(text.startswith("cpu:shm") for text in found), found
