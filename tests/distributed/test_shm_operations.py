"""More operations of backend shm: exchanges, other dtypes, shared tensors, and what torch asks of a backend."""

from __future__ import annotations

from datetime import timedelta

import pytest

from processes import run_processes
from shm_scenarios import (
    DTYPES,
    TIMEOUT,
    ShmScenarios,
    check,
    expected_reduction,
    operand,
    refused,
    report,
    tell,
    wait_for,
)

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = ShmScenarios()
# One step, and staged in pieces.
COUNTS = (1, 1000, 200_001)


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=(2, 3))
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@SCENARIOS.add
def reduce_gives_the_result_to_the_root_alone(rank: int, size: int) -> None:
    import torch.distributed as dist

    for dtype in DTYPES:
        for count in COUNTS:
            for root in range(size):
                data = operand(rank, count, dtype)
                dist.reduce(data, root, op=dist.ReduceOp.MAX)
                expected = (
                    expected_reduction("MAX", size, count, dtype) if rank == root else operand(rank, count, dtype)
                )
                check(data, expected)


@SCENARIOS.add
def all_to_all_transposes_what_ranks_hold(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in (*DTYPES, "complex64"):
        for count in COUNTS:
            mine = [operand(size * rank + peer, count, dtype) for peer in range(size)]
            others = [operand(size * peer + rank, count, dtype) for peer in range(size)]
            parts, whole = [torch.empty_like(part) for part in mine], torch.empty_like(torch.cat(mine))
            dist.all_to_all(parts, mine)
            dist.all_to_all_single(whole, torch.cat(mine))
            check(torch.cat(parts), torch.cat(others))
            check(whole, torch.cat(others))
    # Rank r gives r + p rows to rank p.
    rows = torch.arange(100.0).view(50, 2) + 1000 * rank
    given, taken = [rank + peer for peer in range(size)], [peer + rank for peer in range(size)]
    output = torch.empty(2, sum(taken)).t()
    dist.all_to_all_single(output, rows[: sum(given)], taken, given)
    expected = []
    for peer in range(size):
        begin = sum(peer + other for other in range(rank))
        expected.append(torch.arange(100.0).view(50, 2)[begin : begin + taken[peer]] + 1000 * peer)
    check(output, torch.cat(expected))


@SCENARIOS.add
def what_is_only_moved_may_have_any_dtype(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32", "complex128"):
        own = operand(rank, 12, "float32").view(3, 4).to(getattr(torch, dtype))
        everyone = [operand(peer, 12, "float32").view(3, 4) for peer in range(size)]
        data = own.clone()
        dist.broadcast(data, size - 1)
        check(data.to(torch.float64), everyone[-1].double())
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        check([part.to(torch.float64) for part in parts], [part.double() for part in everyone])
        received = torch.empty_like(own)
        dist.scatter(received, parts if rank == 0 else None)
        check(received.to(torch.float64), everyone[rank].double())


@SCENARIOS.add
def shared_tensors_work_in_every_collective_beside_ordinary_ones(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    import accelerate_cpp

    for count in (1000, 200_000):
        for shared in (range(size), [0]):
            make = accelerate_cpp.shared_tensor if rank in shared else torch.clone
            own, everyone = make(operand(rank, count, "float32")), [operand(p, count, "float32") for p in range(size)]
            parts = [make(torch.zeros(count)) for _ in range(size)]
            dist.all_gather(parts, own)
            check(parts, everyone)
            whole = make(torch.cat(everyone))
            dist.reduce_scatter_tensor(own, whole)
            check(own, size * everyone[rank])
            dist.all_to_all_single(whole, torch.cat([own] * size))
            check(whole, size * torch.cat(everyone))
            dist.broadcast(own, 1)
            check(own, size * everyone[1])
            matrix = make(operand(rank, count, "float32").view(4, -1))[1:3]
            dist.all_reduce(matrix)
            check(matrix, sum(part.view(4, -1)[1:3] for part in everyone))
            del own, parts, whole, matrix


@SCENARIOS.add
def a_group_can_be_split_and_can_allocate(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    import accelerate_cpp

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    part = dist.group.WORLD.split_group([size - 1, 0], group_name="ends")
    assert (part is None) == (rank not in (0, size - 1))
    tensor = backend.allocate_tensor(10, dtype=torch.float32, device=torch.device("cpu"))
    assert accelerate_cpp.is_shared(tensor)
    if part is not None:
        tensor.fill_(rank)
        part.allreduce([tensor]).wait()
        check(tensor, torch.full((10,), float(size - 1)))


@SCENARIOS.add
def a_monitored_barrier_names_every_rank_that_is_missing(rank: int, size: int) -> None:
    import torch.distributed as dist

    group = dist.group.WORLD
    group.monitored_barrier(TIMEOUT, wait_all_ranks=True)
    if rank > 0:
        wait_for("the barrier is over")
        with refused("PeerLost", "rank 0"):
            dist.barrier()
        return
    try:
        with refused("Timeout", "rank 1") as caught:
            group.monitored_barrier(timedelta(milliseconds=100), wait_all_ranks=True)
        assert all(f"rank {peer}" in str(caught.value) for peer in range(1, size))
    finally:
        tell("the barrier is over")


@SCENARIOS.add
def profilers_see_the_operations(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0, async_op=True).wait()
    assert {"shm:all_reduce", "shm:broadcast"} <= {event.name for event in profile.events()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert not report(failures, name), report(failures, name)
