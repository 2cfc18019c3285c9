"""Checks of the collectives of torch.distributed, tensors and objects."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed.distributed_c10d import _coalescing_manager

from features_common import Ranks, check, refused

COUNTS = (1, 1000, 70_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8)


def all_reduce(ranks: Ranks) -> None:
    for dtype in DTYPES:
        for count in COUNTS:
            stacked = torch.stack(ranks.everyone(count))
            for op, expected in {
                dist.ReduceOp.SUM: stacked.sum(0),
                dist.ReduceOp.MIN: stacked.min(0).values,
                dist.ReduceOp.MAX: stacked.max(0).values,
                dist.ReduceOp.PRODUCT: stacked.prod(0),
            }.items():
                data = ranks.values(count).to(dtype)
                dist.all_reduce(data, op)
                check(data, expected.to(dtype))


def all_reduce_of_bfloat16(ranks: Ranks) -> None:
    data = ranks.values(1000).bfloat16()
    dist.all_reduce(data)
    check(data, ranks.total(1000).bfloat16())


def all_reduce_average(ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        data = ranks.values(1000).to(dtype)
        dist.all_reduce(data, dist.ReduceOp.AVG)
        check(data, (ranks.total(1000) / ranks.size).to(dtype))


def bitwise(ranks: Ranks) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        values = [part.to(dtype) * 3 for part in ranks.everyone(1000)]
        expected = values[0], values[0], values[0]
        for other in values[1:]:
            expected = expected[0] & other, expected[1] | other, expected[2] ^ other
        for op, result in zip((dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR), expected, strict=True):
            data = values[ranks.rank].clone()
            dist.all_reduce(data, op)
            check(data, result)


def premultiplied_sum(ranks: Ranks) -> None:
    op = dist._make_nccl_premul_sum(0.25)
    data = ranks.values(1000)
    dist.all_reduce(data, op)
    check(data, ranks.total(1000) / 4)
    part = torch.empty(100)
    dist.reduce_scatter_tensor(part, ranks.values(100 * ranks.size), op)
    check(part, ranks.total(100 * ranks.size).chunk(ranks.size)[ranks.rank] / 4)


def strided_tensors(ranks: Ranks) -> None:
    """What lies between the elements stays as it is."""
    base = torch.zeros(6, 4)
    strided = base[::2].t()
    strided += ranks.rank + 1
    dist.all_reduce(strided)
    check(strided, torch.full_like(strided, ranks.size * (ranks.size + 1) / 2))
    check(base[1::2], torch.zeros(3, 4))


def awkward_tensors(ranks: Ranks) -> None:
    total = ranks.size * (ranks.size + 1) / 2
    scalar = torch.tensor(ranks.rank + 1.0)
    channels_last = torch.full((2, 3, 4, 4), ranks.rank + 1.0).to(memory_format=torch.channels_last)
    for data in (scalar, channels_last):
        dist.all_reduce(data)
        check(data, torch.full_like(data, total))
    pair = torch.tensor([complex(ranks.rank + 1, 1)])
    dist.all_reduce(pair)
    check(pair, torch.tensor([complex(total, ranks.size)]))
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    truth = torch.tensor([ranks.rank == 0, False])
    dist.broadcast(truth, 0)
    check(truth, torch.tensor([True, False]))


def broadcast(ranks: Ranks) -> None:
    for source in range(ranks.size):
        for count in COUNTS:
            data = ranks.values(count)
            dist.broadcast(data, source)
            check(data, ranks.values(count, source))


def reduce(ranks: Ranks) -> None:
    for root in range(ranks.size):
        for count in COUNTS:
            data = ranks.values(count)
            dist.reduce(data, root, dist.ReduceOp.MAX)
            if ranks.rank == root:
                check(data, torch.stack(ranks.everyone(count)).max(0).values)


def all_gather(ranks: Ranks) -> None:
    for dtype in (*DTYPES, torch.bfloat16, torch.bool):
        for count in COUNTS:
            everyone = [part.to(dtype) for part in ranks.everyone(count)]
            parts = [torch.empty(count, dtype=dtype) for _ in everyone]
            dist.all_gather(parts, everyone[ranks.rank])
            one = torch.empty(count * ranks.size, dtype=dtype)
            dist.all_gather_into_tensor(one, everyone[ranks.rank])
            check(parts, everyone)
            check(one, torch.cat(everyone))


def all_gather_of_different_sizes(ranks: Ranks) -> None:
    sizes = [5 * rank * rank for rank in range(ranks.size)]
    parts = [torch.empty(count) for count in sizes]
    dist.all_gather(parts, ranks.values(sizes[ranks.rank]))
    check(parts, [ranks.values(count, rank) for rank, count in enumerate(sizes)])


def gather_and_scatter(ranks: Ranks) -> None:
    for root in range(ranks.size):
        for count in COUNTS:
            at_root = ranks.rank == root
            parts = [torch.empty(count) for _ in range(ranks.size)]
            dist.gather(ranks.values(count), parts if at_root else None, root)
            if at_root:
                check(parts, ranks.everyone(count))
            own = torch.empty(count)
            dist.scatter(own, ranks.everyone(count) if at_root else None, root)
            check(own, ranks.values(count))


def reduce_scatter(ranks: Ranks) -> None:
    for count in COUNTS:
        whole = ranks.values(count * ranks.size)
        expected = ranks.total(count * ranks.size).chunk(ranks.size)[ranks.rank]
        from_list, from_tensor, average = torch.empty(count), torch.empty(count), torch.empty(count)
        dist.reduce_scatter(from_list, list(whole.chunk(ranks.size)))
        dist.reduce_scatter_tensor(from_tensor, whole)
        dist.reduce_scatter_tensor(average, whole, dist.ReduceOp.AVG)
        check(from_list, expected)
        check(from_tensor, expected)
        check(average, expected / ranks.size)


def all_to_all_single(ranks: Ranks) -> None:
    for count in COUNTS:
        received = torch.empty(count * ranks.size)
        dist.all_to_all_single(received, ranks.values(count * ranks.size))
        check(received, torch.cat([part.chunk(ranks.size)[ranks.rank] for part in ranks.everyone(count * ranks.size)]))


def pieces(ranks: Ranks, sender: int) -> list[torch.Tensor]:
    """What a rank gives to each of the others: pieces of different sizes, one of them empty."""
    sizes = [(3 * sender + 2 * receiver) % 5 for receiver in range(ranks.size)]
    return list(ranks.values(sum(sizes), sender).split(sizes))


def all_to_all_of_different_sizes(ranks: Ranks) -> None:
    own, expected = pieces(ranks, ranks.rank), [pieces(ranks, sender)[ranks.rank] for sender in range(ranks.size)]
    received = torch.empty(sum(map(len, expected)))
    dist.all_to_all_single(received, torch.cat(own), [len(p) for p in expected], [len(p) for p in own])
    check(received, torch.cat(expected))


def all_to_all(ranks: Ranks) -> None:
    for count in COUNTS:
        received = [torch.empty(count) for _ in range(ranks.size)]
        dist.all_to_all(received, list(ranks.values(count * ranks.size).chunk(ranks.size)))
        check(received, [part.chunk(ranks.size)[ranks.rank] for part in ranks.everyone(count * ranks.size)])


def all_to_all_of_lists_of_different_sizes(ranks: Ranks) -> None:
    expected = [pieces(ranks, sender)[ranks.rank] for sender in range(ranks.size)]
    received = [torch.empty_like(piece) for piece in expected]
    dist.all_to_all(received, pieces(ranks, ranks.rank))
    check(received, expected)


def all_reduce_coalesced(ranks: Ranks) -> None:
    parts = [ranks.values(count) for count in (1, 7, 1000)]
    dist.all_reduce_coalesced(parts)
    check(parts, [ranks.total(count) for count in (1, 7, 1000)])


def coalescing_manager(ranks: Ranks) -> None:
    """Each kind of operation, synchronous and not; afterwards collectives must not be swallowed."""
    counts = (1, 7, 1000)
    for asynchronous in (False, True):
        reduced = [ranks.values(count) for count in counts]
        gathered = [torch.empty(count * ranks.size) for count in counts]
        scattered = [torch.empty(count) for count in counts]
        with _coalescing_manager(async_ops=asynchronous) as first:
            for data in reduced:
                dist.all_reduce(data)
        with _coalescing_manager(async_ops=asynchronous) as second:
            for data, count in zip(gathered, counts, strict=True):
                dist.all_gather_into_tensor(data, ranks.values(count))
        with _coalescing_manager(async_ops=asynchronous) as third:
            for data, count in zip(scattered, counts, strict=True):
                dist.reduce_scatter_tensor(data, ranks.values(count * ranks.size))
        if asynchronous:
            for manager in (first, second, third):
                manager.wait()
        for index, count in enumerate(counts):
            check(reduced[index], ranks.total(count))
            check(gathered[index], torch.cat(ranks.everyone(count)))
            check(scattered[index], ranks.total(count * ranks.size).chunk(ranks.size)[ranks.rank])
    afterwards = torch.ones(1)
    dist.all_reduce(afterwards)
    check(afterwards, torch.full((1,), float(ranks.size)))


def coalescing_on_device(ranks: Ranks) -> None:
    """With a device, each call inside reaches the backend between its startCoalescing and endCoalescing."""
    reduced, root = ranks.values(1000), ranks.values(10)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(reduced, async_op=True)
        dist.broadcast(root, 0, async_op=True)
    manager.wait()
    check(reduced, ranks.total(1000))
    check(root, ranks.values(10, 0))
    afterwards = torch.ones(1)
    dist.all_reduce(afterwards)
    check(afterwards, torch.full((1,), float(ranks.size)))


def asynchronous(ranks: Ranks) -> None:
    """Many at once, of several kinds, waited for in another order than issued; and what futures give."""
    reduced = [ranks.values(count) for count in range(1, 20)]
    gathered = [torch.empty(count * ranks.size) for count in range(1, 20)]
    works = [dist.all_reduce(data, async_op=True) for data in reduced]
    works += [
        dist.all_gather_into_tensor(data, ranks.values(len(data) // ranks.size), async_op=True) for data in gathered
    ]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    for count, (total, parts) in enumerate(zip(reduced, gathered, strict=True), 1):
        check(total, ranks.total(count))
        check(parts, torch.cat(ranks.everyone(count)))
    future = dist.all_reduce(ranks.values(5), async_op=True).get_future()
    check(future.then(lambda done: done.value()[0] * 2).wait(), ranks.total(5) * 2)
    assert dist.barrier(async_op=True).wait()


def from_callbacks(ranks: Ranks) -> None:
    """A callback of a future issues an operation, and waits for it, in whatever thread it runs."""

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        total = done.value()[0] / ranks.size
        result: torch.Tensor = dist.all_reduce(total, async_op=True).get_future().wait()[0]
        return result

    for _ in range(10):
        future = dist.all_reduce(ranks.values(5), async_op=True).get_future().then(again)
        check(future.wait(), ranks.total(5))


def with_gradients(ranks: Ranks) -> None:
    """The derivative of the sum over ranks of weighted results."""
    own = ranks.values(6).requires_grad_()
    weights = [torch.arange(6.0) + rank for rank in range(ranks.size)]
    (differentiable.all_reduce(own, group=dist.group.WORLD) * weights[ranks.rank]).sum().backward()
    check(own.grad, torch.stack(weights).sum(0))
    own.grad = None
    parts = differentiable.all_gather(own, dist.group.WORLD)
    check(torch.stack(parts).detach(), torch.stack(ranks.everyone(6)))
    (parts[0] * weights[ranks.rank]).sum().backward()
    check(own.grad, torch.stack(weights).sum(0) if ranks.rank == 0 else torch.zeros(6))


def objects(ranks: Ranks) -> None:
    """Ranks give objects of very different sizes."""
    everyone = [{"rank": rank, "text": "x" * (rank * 100_000)} for rank in range(ranks.size)]
    gathered = [None] * ranks.size
    dist.all_gather_object(gathered, everyone[ranks.rank])
    assert gathered == everyone
    last = ranks.size - 1
    at_root = [None] * ranks.size if ranks.rank == last else None
    dist.gather_object(everyone[ranks.rank], at_root, dst=last)
    assert at_root == (everyone if ranks.rank == last else None)
    received = [None]
    dist.scatter_object_list(received, everyone if ranks.rank == 0 else None, src=0)
    assert received == [everyone[ranks.rank]]
    shared = [ranks.rank, everyone[ranks.rank]]
    dist.broadcast_object_list(shared, src=last)
    assert shared == [last, everyone[last]]


def barrier(ranks: Ranks) -> None:
    """Nobody leaves before everybody has come."""
    for turn in range(20):
        ranks.tell(f"{turn} {ranks.rank}")
        dist.barrier()
        assert ranks.store.check([f"{turn} {rank}" for rank in range(ranks.size)])


def mismatch(ranks: Ranks) -> None:
    """Ranks that disagree all get the same error, and can go on."""
    with refused("Every rank must call the same collectives"):
        dist.barrier() if ranks.rank == 0 else dist.all_reduce(torch.ones(4))
    data = ranks.values(5)
    dist.all_reduce(data)
    check(data, ranks.total(5))
