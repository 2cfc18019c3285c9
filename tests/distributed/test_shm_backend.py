"""Synchronous collectives of backend shm through torch.distributed, in two and three real processes."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import pytest

from processes import run_processes
from shm_scenarios import (
    DTYPES,
    FLOATING,
    TIMEOUT,
    ShmScenarios,
    check,
    expected_reduction,
    operand,
    refused,
    register,
    report,
)

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = ShmScenarios()
WORLDS = (2, 3)
# One step, whole operands staged in pieces, and an odd number of elements beyond several pieces.
COUNTS = (1, 1000, 700_001)


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=WORLDS)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@SCENARIOS.add
def all_reduce_is_exact_for_every_operation_dtype_and_size(rank: int, size: int) -> None:
    import torch.distributed as dist

    for dtype in DTYPES:
        for op in ("SUM", "MIN", "MAX", "PRODUCT", *(("AVG",) if dtype in FLOATING else ())):
            for count in COUNTS:
                data = operand(rank, count, dtype)
                dist.all_reduce(data, op=getattr(dist.ReduceOp, op))
                check(data, expected_reduction(op, size, count, dtype), exact=op != "AVG")


@SCENARIOS.add
def all_reduce_fills_strided_expanded_dimensionless_and_empty_tensors(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    base = torch.zeros(6, 4)
    strided = base[::2].t()
    strided += rank + 1
    dist.all_reduce(strided)
    total = size * (size + 1) / 2
    check(strided, torch.full((4, 3), total))
    check(base[1::2], torch.zeros(3, 4))
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    check(scalar, torch.tensor(total))
    image = torch.full((2, 3, 4, 4), float(rank + 1)).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    check(image, torch.full((2, 3, 4, 4), total))
    dist.all_reduce(torch.empty(0))


@SCENARIOS.add
def complex_numbers_are_summed_as_pairs(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.full((5,), complex(rank, 1))
    dist.all_reduce(data)
    check(data, torch.full((5,), complex(size * (size - 1) / 2, size)))


@SCENARIOS.add
def broadcast_copies_from_any_rank(rank: int, size: int) -> None:
    import torch.distributed as dist

    for dtype in DTYPES:
        for source in range(size):
            data = operand(rank, 333, dtype)
            dist.broadcast(data, source)
            check(data, operand(source, 333, dtype))
    matrix = operand(rank, 300_000, "float32").view(500, 600)
    dist.broadcast(matrix.t(), size - 1)
    check(matrix, operand(size - 1, 300_000, "float32").view(500, 600))


@SCENARIOS.add
def all_gather_keeps_rank_order_in_lists_and_in_one_tensor(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in DTYPES:
        for count in COUNTS:
            own = operand(rank, count, dtype)
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own)
            whole = torch.empty(size * count, dtype=own.dtype)
            dist.all_gather_into_tensor(whole, own)
            for peer in range(size):
                check(parts[peer], operand(peer, count, dtype))
            check(whole, torch.cat(parts))
    matrix = operand(rank, 12, "float32").view(3, 4).t()
    outputs = list(torch.zeros(4, 3, size).unbind(2))
    dist.all_gather(outputs, matrix)
    for peer in range(size):
        check(outputs[peer], operand(peer, 12, "float32").view(3, 4).t())


@SCENARIOS.add
def gather_fills_the_list_of_the_root_alone(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for root in range(size):
        for count in COUNTS:
            parts = [torch.empty(count, dtype=torch.int32) for _ in range(size)] if rank == root else None
            dist.gather(operand(rank, count, "int32"), parts, dst=root)
            for peer, part in enumerate(parts or []):
                check(part, operand(peer, count, "int32"))


@SCENARIOS.add
def scatter_hands_each_rank_its_part(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for root in range(size):
        for count in COUNTS:
            parts = [operand(peer, count, "float16") for peer in range(size)] if rank == root else None
            own = torch.zeros(2 * count, dtype=torch.float16)[::2]
            dist.scatter(own, parts, src=root)
            check(own, operand(rank, count, "float16"))


@SCENARIOS.add
def reduce_scatter_gives_each_rank_its_slice(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for op in ("SUM", "AVG", "MAX"):
        for count in COUNTS:
            contributions = [operand(rank + peer, count, "float32") for peer in range(size)]
            expected = reduce(
                torch.maximum if op == "MAX" else operator.add,
                [operand(source + rank, count, "float64") for source in range(size)],
            )
            expected = (expected / size if op == "AVG" else expected).float()
            from_list, from_tensor = torch.empty(count), torch.empty(count)
            dist.reduce_scatter(from_list, contributions, op=getattr(dist.ReduceOp, op))
            dist.reduce_scatter_tensor(from_tensor, torch.cat(contributions), op=getattr(dist.ReduceOp, op))
            check(from_list, expected, exact=op != "AVG")
            check(from_tensor, from_list)


@SCENARIOS.add
def objects_travel_whatever_their_sizes(rank: int, size: int) -> None:
    import torch.distributed as dist

    own = {"rank": rank, "text": "x" * (rank * 100_000)}
    everyone = [{"rank": peer, "text": "x" * (peer * 100_000)} for peer in range(size)]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    assert gathered == everyone
    at_root: list[Any] = [None] * size
    dist.gather_object(own, at_root if rank == 1 else None, dst=1)
    assert at_root == (everyone if rank == 1 else [None] * size)
    received: list[Any] = [None]
    dist.scatter_object_list(received, everyone if rank == 0 else None, src=0)
    assert received == [own]
    shared = [rank, "from", own]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [1, "from", everyone[1]]


@SCENARIOS.add
def the_group_has_the_name_and_the_timeout_it_was_given(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.get_backend_config() == "cpu:shm"
    assert (backend.name(), backend.rank(), backend.size()) == ("shm", rank, size)
    assert backend.timeout == TIMEOUT


@SCENARIOS.add
def a_subset_of_the_ranks_has_collectives_of_its_own(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    members = [size - 1, 0]
    pair = dist.new_group(members)
    alone = dist.new_group([1])
    if rank in members:
        data = torch.tensor([float(rank)])
        dist.all_reduce(data, group=pair)
        check(data, torch.tensor([float(size - 1)]))
    if rank == 1:
        data = torch.tensor([5.0])
        dist.all_reduce(data, group=alone)
        parts = [torch.zeros(1)]
        dist.all_gather(parts, data, group=alone)
        check(parts[0], torch.tensor([5.0]))
    dist.all_reduce(torch.ones(1))
    for group, ranks in ((pair, members), (alone, [1])):
        if rank in ranks:
            dist.destroy_process_group(group)


@SCENARIOS.add
def unusable_tensors_are_invalid_arguments_and_do_no_harm(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    whole = torch.ones(2 * size + 1)
    shorts = torch.ones(2).to(torch.uint16)
    for text, call in {
        "an average of int64 values": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
        "dtype UInt16 cannot be reduced": lambda: dist.all_reduce(shorts),
        "sparse tensors can be combined with SUM": lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
        "elements of that of one rank; found": lambda: dist.all_gather_into_tensor(whole, torch.ones(2)),
        "pass split sizes": lambda: dist.all_to_all_single(whole, whole.clone()),
        "elements share memory": lambda: dist.all_reduce(torch.ones(1).expand(3)),
    }.items():
        with refused("InvalidArgument", text):
            call()
    dist.all_reduce(whole)
    check(whole, torch.full((2 * size + 1,), float(size)))


@SCENARIOS.add
def different_collectives_are_shown_as_a_table_and_do_no_harm(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    with refused("MismatchedCollective", "rank 1: all_reduce(sum) of [5] float64"):
        dist.all_reduce(torch.ones(5, dtype=torch.float64) if rank == 1 else torch.ones(4, dtype=torch.float32))
    with refused("MismatchedCollective", "rank 0: barrier"):
        dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(4))
    with refused("MismatchedCollective", "Every rank must call the same collectives"):
        dist.broadcast(torch.ones(4), rank)
    data = torch.ones(1)
    dist.all_reduce(data)
    check(data, torch.full((1,), float(size)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert not report(failures, name), report(failures, name)


def short_name() -> list[float]:
    import torch

    dist = register()
    dist.init_process_group("shm")
    data = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(data)
    dist.destroy_process_group()
    return data.tolist()


def test_the_short_backend_name_works_too() -> None:
    assert run_processes(short_name, 2) == [[1.0, 2.0]] * 2


def gloo_beside_ours() -> tuple[float, float]:
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    gloo = dist.new_group(backend="gloo")
    ours, theirs = torch.ones(()), torch.ones(())
    dist.all_reduce(ours)
    dist.all_reduce(theirs, group=gloo)
    dist.destroy_process_group()
    return ours.item(), theirs.item()


def test_a_gloo_group_works_beside_ours() -> None:
    assert run_processes(gloo_beside_ours, 2) == [(2.0, 2.0)] * 2
