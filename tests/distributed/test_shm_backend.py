"""Backend shm through torch.distributed, in two and three real processes."""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest

from processes import run_processes
from scenarios import outlive_the_others

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Scenario = Callable[[int, int], None]
SCENARIOS: dict[str, Scenario] = {}
WORLDS = (2, 3)
FLOATING = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATING, "int8", "int16", "int32", "int64", "uint8", "bool")
# One step, whole operands staged in pieces, and an odd number of elements beyond several pieces.
COUNTS = (1, 1000, 700_001)


def scenario(function: Scenario) -> Scenario:
    """Called as ``function(rank, size)`` on every rank of one group; its name is the sentence that must hold."""
    SCENARIOS[function.__name__] = function
    return function


def register() -> Any:
    """torch.distributed, which knows backend shm."""
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register as register_backend

    register_backend()
    return dist


def run_scenarios() -> dict[str, str]:
    """The traceback of every scenario that failed on this rank. Each has a group of its own, so that it fails alone."""
    import warnings

    warnings.simplefilter("ignore", FutureWarning)
    dist = register()
    store, rank, size = next(dist.rendezvous("env://"))
    failures = {}
    for name, function in SCENARIOS.items():
        own = {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": size}
        dist.init_process_group("cpu:shm", timeout=timedelta(seconds=120), **own)
        try:
            function(rank, size)
        except Exception:
            failures[name] = traceback.format_exc()
        dist.destroy_process_group()
    outlive_the_others(store, rank, size)
    return failures


@pytest.fixture(scope="module", params=WORLDS)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


def check(actual: Any, expected: Any, exact: bool = True) -> None:
    import torch

    torch.testing.assert_close(actual, expected, **({"rtol": 0, "atol": 0} if exact else {}))


@contextmanager
def refused(kind: str, text: str) -> Iterator[None]:
    """The block raises an error whose class is called ``kind`` with ``text`` in its message."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        yield
    assert caught.type.__name__ == kind


def operand(rank: int, count: int, dtype: str) -> Any:
    """Small positive integers, exact in every dtype whatever the order of summation."""
    import torch

    values = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    return (values > 3) if dtype == "bool" else values.to(getattr(torch, dtype))


def expected_reduction(op: str, size: int, count: int, dtype: str) -> Any:
    import torch

    if dtype == "bool":  # as numbers that are then compared with 0
        numbers = torch.stack([operand(rank, count, dtype) for rank in range(size)])
        return numbers.all(0) if op in ("MIN", "PRODUCT") else numbers.any(0)
    operands = [operand(rank, count, dtype).double() for rank in range(size)]
    combine: dict[str, Callable[[Any, Any], Any]] = {"MIN": torch.minimum, "MAX": torch.maximum}
    combine |= {"PRODUCT": operator.mul}
    combined = reduce(combine.get(op, operator.add), operands)
    return (combined / size if op == "AVG" else combined).to(getattr(torch, dtype))


@scenario
def all_reduce_is_exact_for_every_operation_dtype_and_size(rank: int, size: int) -> None:
    import torch.distributed as dist

    for dtype in DTYPES:
        for op in ("SUM", "MIN", "MAX", "PRODUCT", *(("AVG",) if dtype in FLOATING else ())):
            for count in COUNTS:
                data = operand(rank, count, dtype)
                dist.all_reduce(data, op=getattr(dist.ReduceOp, op))
                check(data, expected_reduction(op, size, count, dtype), exact=op != "AVG")


@scenario
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


@scenario
def complex_numbers_are_summed_as_pairs(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.full((5,), complex(rank, 1))
    dist.all_reduce(data)
    check(data, torch.full((5,), complex(size * (size - 1) / 2, size)))


@scenario
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


@scenario
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


@scenario
def gather_fills_the_list_of_the_root_alone(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for root in range(size):
        for count in COUNTS:
            parts = [torch.empty(count, dtype=torch.int32) for _ in range(size)] if rank == root else None
            dist.gather(operand(rank, count, "int32"), parts, dst=root)
            for peer, part in enumerate(parts or []):
                check(part, operand(peer, count, "int32"))


@scenario
def scatter_hands_each_rank_its_part(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for root in range(size):
        for count in COUNTS:
            parts = [operand(peer, count, "float16") for peer in range(size)] if rank == root else None
            own = torch.zeros(2 * count, dtype=torch.float16)[::2]
            dist.scatter(own, parts, src=root)
            check(own, operand(rank, count, "float16"))


@scenario
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


@scenario
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


@scenario
def async_calls_give_finished_handles_and_futures(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    total = float(size * (size + 1) / 2)
    data = torch.full((3,), float(rank + 1))
    work = dist.all_reduce(data, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    check(data, torch.full((3,), total))
    doubled = dist.all_reduce(data, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    check(doubled.wait(), torch.full((3,), 2 * total * size))
    parts = [torch.empty(2) for _ in range(size)]
    check(dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True).get_future().wait()[-1], parts[-1])
    check(parts[-1], torch.full((2,), float(size - 1)))
    assert dist.barrier(async_op=True).wait()


@scenario
def the_group_has_the_name_and_the_timeout_it_was_given(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.get_backend_config() == "cpu:shm"
    assert (backend.name(), backend.rank(), backend.size()) == ("shm", rank, size)
    assert backend.timeout == timedelta(seconds=120)


@scenario
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


@scenario
def unavailable_operations_are_refused_by_torch_and_do_no_harm(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    data = torch.ones(size)
    for name, call in {
        "alltoall_base": lambda: dist.all_to_all_single(data, data.clone()),
        "reduce": lambda: dist.reduce(data, 0),
        "send" if rank == 0 else "recv": lambda: dist.send(data, 1) if rank == 0 else dist.recv(data, 0),
    }.items():
        with refused("RuntimeError", f"Backend shm does not support {name}"):
            call()
    data = torch.ones(1)
    dist.all_reduce(data)
    check(data, torch.full((1,), float(size)))


@scenario
def unusable_tensors_are_invalid_arguments_and_do_no_harm(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    whole = torch.ones(2 * size + 1)
    for text, call in {
        "dense CPU tensors, found a tensor on cpu with layout sparse": lambda: dist.all_reduce(
            torch.ones(2).to_sparse()
        ),
        "an average of int64 values": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
        "expected SUM, AVG, MIN, MAX or PRODUCT": lambda: dist.all_reduce(torch.ones(2).int(), dist.ReduceOp.BXOR),
        "dtype UInt16 cannot be communicated": lambda: dist.broadcast(torch.ones(2).to(torch.uint16), 0),
        "cannot be divided evenly": lambda: dist.all_gather_into_tensor(whole, torch.ones(2)),
        "elements of float32, expected 3 of float32": lambda: dist.all_gather([torch.ones(2)] * size, torch.ones(3)),
    }.items():
        with refused("InvalidArgument", text):
            call()
    dist.all_reduce(whole)
    check(whole, torch.full((2 * size + 1,), float(size)))


@scenario
def different_collectives_are_shown_as_a_table_and_do_no_harm(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    with refused("MismatchedCollective", "rank 1: all_reduce(sum) of 5 float64"):
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
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)


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
