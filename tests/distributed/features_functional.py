"""Checks of the functional collectives, eager and compiled: each check can be told a compiler to go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from features_common import Ranks, check


def through(compiler: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as one graph of ``compiler``, or as it is."""
    if not compiler:
        return function
    torch._dynamo.reset()
    return torch.compile(function, backend=compiler, fullgraph=True)


def reductions(ranks: Ranks, compiler: str = "") -> None:
    group = dist.group.WORLD

    def run(data: Tensor) -> list[Tensor]:
        total = functional.all_reduce(data * 2, "sum", group)
        return [
            total,
            functional.all_reduce(total, "avg", group) + 1,
            functional.all_reduce(data, "max", group),
            functional.reduce_scatter_tensor(data, "sum", 0, group),
            functional.reduce_scatter_tensor(data.view(2, -1), "avg", 1, group),
            functional.broadcast(data, 1, group),
        ]

    count = 6 * ranks.size
    total = ranks.total(count)
    results = through(compiler, run)(ranks.values(count))
    part = total.chunk(ranks.size)[ranks.rank]
    columns = (total / ranks.size).view(2, -1).chunk(ranks.size, 1)[ranks.rank]
    greatest = torch.stack(ranks.everyone(count)).max(0).values
    check(results, [total * 2, total * 2 + 1, greatest, part, columns, ranks.values(count, 1)])


def gathers(ranks: Ranks, compiler: str = "") -> None:
    group = dist.group.WORLD

    def run(data: Tensor) -> list[Tensor]:
        return [
            functional.all_gather_tensor(data, 0, group),
            functional.all_gather_tensor(data.view(2, 3), 1, group) * 2,
        ]

    expected = [torch.cat(ranks.everyone(6)), torch.cat([part.view(2, 3) for part in ranks.everyone(6)], 1) * 2]
    check(through(compiler, run)(ranks.values(6)), expected)


def exchanges(ranks: Ranks, compiler: str = "") -> None:
    """Pieces of different sizes, pieces of one size, and whole tensors sent round in a ring."""
    group, peers = dist.group.WORLD, range(ranks.size)
    given = [ranks.rank + 2 * peer for peer in peers]
    taken = [peer + 2 * ranks.rank for peer in peers]
    ring = [(peer + 1) % ranks.size for peer in peers]

    def run(uneven: Tensor, even: Tensor) -> list[Tensor]:
        return [
            functional.all_to_all_single(uneven, taken, given, group) + 1,
            functional.all_to_all_single(even, None, None, group),
            functional.permute_tensor(even, ring, group),
        ]

    def pieces(rank: int) -> tuple[Tensor, ...]:
        sizes = [rank + 2 * peer for peer in peers]
        return ranks.values(sum(sizes), rank).split(sizes)

    results = through(compiler, run)(torch.cat(pieces(ranks.rank)), ranks.values(4 * ranks.size))
    check(results[0], torch.cat([pieces(peer)[ranks.rank] for peer in peers]) + 1)
    check(results[1], torch.cat([part.chunk(ranks.size)[ranks.rank] for part in ranks.everyone(4 * ranks.size)]))
    check(results[2], ranks.values(4 * ranks.size, (ranks.rank - 1) % ranks.size))


def coalesced(ranks: Ranks, compiler: str = "") -> None:
    group, counts = dist.group.WORLD, (2 * ranks.size, 6 * ranks.size)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        return [
            *functional.all_reduce_coalesced(inputs, "sum", group),
            *functional.all_gather_into_tensor_coalesced(inputs, group),
            *functional.reduce_scatter_tensor_coalesced(inputs, "avg", [0, 0], group),
        ]

    totals = [ranks.total(count) for count in counts]
    gathered = [torch.cat(ranks.everyone(count)) for count in counts]
    parts = [(total / ranks.size).chunk(ranks.size)[ranks.rank] for total in totals]
    check(through(compiler, run)([ranks.values(count) for count in counts]), [*totals, *gathered, *parts])


def gradients(ranks: Ranks, compiler: str = "") -> None:
    """Derivatives of each collective's result, weighted differently on every rank."""
    group, count = dist.group.WORLD, 2 * ranks.size
    weights = [torch.arange(float(count)) + rank for rank in range(ranks.size)]

    def gather(data: Tensor) -> Tensor:
        gathered = functional.all_gather_tensor_autograd(data, 0, group)
        return (gathered * weights[ranks.rank].repeat(ranks.size)).sum()

    def scatter(data: Tensor) -> Tensor:
        part = functional.reduce_scatter_tensor_autograd(data, "sum", 0, group)
        return (part * weights[ranks.rank][:2]).sum()

    def exchange(data: Tensor) -> Tensor:
        return (functional.all_to_all_single_autograd(data, None, None, group) * weights[ranks.rank]).sum()

    for run, expected in {
        gather: torch.stack(weights).sum(0),
        scatter: torch.cat([weight[:2] for weight in weights]),
        exchange: torch.cat([weight.view(ranks.size, 2)[ranks.rank] for weight in weights]),
    }.items():
        data = ranks.values(count).requires_grad_()
        through(compiler, run)(data).backward()
        check(data.grad, expected)


def ordinary_calls(ranks: Ranks, compiler: str = "") -> None:
    """The functions of torch.distributed, which a compiler turns into functional ones."""

    def run(data: Tensor) -> list[Tensor]:
        total, gathered, part, exchanged = data * 1, torch.empty(2 * len(data)), torch.empty(3), torch.empty_like(data)
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, data)
        dist.reduce_scatter_tensor(part, data)
        dist.all_to_all_single(exchanged, data)
        return [total + 1, gathered + 1, part + 1, exchanged + 1]

    expected = [ranks.total(6), torch.cat(ranks.everyone(6)), ranks.total(6).chunk(2)[ranks.rank]]
    expected.append(torch.cat([part.chunk(2)[ranks.rank] for part in ranks.everyone(6)]))
    check(through(compiler, run)(ranks.values(6)), [part + 1 for part in expected])


def messages(ranks: Ranks, compiler: str = "") -> None:
    """A batch of sends and receives."""
    peer = 1 - ranks.rank

    def run(data: Tensor) -> Tensor:
        received = torch.empty_like(data)
        operations = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received + 1

    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        check(through(compiler, run)(ranks.values(6)), ranks.values(6, peer) + 1)


ALL = (reductions, gathers, exchanges, coalesced, gradients, ordinary_calls, messages)


def compiled(ranks: Ranks) -> None:
    for one in ALL:
        one(ranks, "aot_eager")


def compiled_with_inductor(ranks: Ranks) -> None:
    for one in ALL:
        one(ranks, "inductor")
