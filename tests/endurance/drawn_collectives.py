"""Collectives and messages that all ranks draw alike from a seed, and what torch computes of the same operands alone.

Each rank knows the operands of all ranks, as they come from the seed, the number of the operation and the rank. So it
computes what it has to get with plain torch operations, and compares every element.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp import shared_empty

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
LARGEST = (1, 40, 3000, 40_000, 400_000)
"""Up to how many elements a tensor has: operands travel in other ways from 8 KiB, from 32 KiB and from 64 KiB on."""
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 2e-1}
_BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Ranks:
    """The groups of this process, by the ranks in them, and what it draws: the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self.rank, self.size, self.seed = dist.get_rank(), dist.get_world_size(), seed
        self.dice, self.step = random.Random(seed), 0
        world = tuple(range(self.size))
        members = [world, *(pair for pair in ((0, 1), (self.size - 2, self.size - 1)) if self.size > 2)]
        self.groups = {ranks: dist.new_group(ranks) for ranks in dict.fromkeys(members)}

    def run(self, operations: int) -> None:
        """Draws and carries out so many operations.

        Raises:
            AssertionError: a result differs; the message says the seed, the operation and the elements.
        """
        for self.step in range(operations):
            operation = self.dice.choice(OPERATIONS)
            ranks = self.dice.choice([*self.groups])
            call = Call(self, ranks, self.dice.randrange(1 << 30))
            if self.rank not in ranks:
                continue
            try:
                operation(call)
            except Exception as error:
                where = f"seed {self.seed}, operation {self.step}, rank {self.rank}"
                raise AssertionError(f"{where}: {operation.__name__} of {call}: {error}") from error


class Call:
    """One operation: the group, and what its ranks draw for it alike."""

    def __init__(self, owner: Ranks, ranks: Sequence[int], seed: int) -> None:
        self.dice, self._seed = random.Random(seed), seed
        self.ranks, self.group, self.rank = ranks, owner.groups[tuple(ranks)], owner.rank
        self.size = len(ranks)
        self.own = ranks.index(owner.rank) if owner.rank in ranks else -1
        self.dtype = self.dice.choice((*FLOATS, *INTEGERS))
        self.root = self.dice.randrange(self.size)
        self.asynchronous = self.dice.random() < 0.3
        self.count = self.dice.randrange(self.dice.choice(LARGEST) + 1)
        self._shared = [self.dice.random() < 0.5 for _ in ranks] if self.dice.random() < 0.3 else None
        self._all_shared = self.dice.random() < 0.4

    def __str__(self) -> str:
        return f"{self.count} {self.dtype} in group {tuple(self.ranks)}, root {self.root}, async {self.asynchronous}"

    def reduction(self) -> str:
        """The name of a reduction that the dtype allows."""
        if self.dtype in FLOATS:
            return self.dice.choice(("SUM", "AVG", "MIN", "MAX"))
        bits = () if self.dtype is torch.bool else tuple(_BITWISE)
        return self.dice.choice(("SUM", "MIN", "MAX", *bits))

    def uneven(self, blocks: int) -> list[int]:
        """So many counts of elements, some of them 0."""
        most = self.count // blocks + 1
        return [0 if self.dice.random() < 0.2 else self.dice.randrange(most + 1) for _ in range(blocks)]

    def operand(self, owner: int, count: int | None = None, block: int = 0) -> torch.Tensor:
        """What the member ``owner`` of the group has, in ordinary memory."""
        generator = torch.Generator().manual_seed(self._seed * 1009 + owner * 31 + block)
        shape = (self.count if count is None else count,)
        if self.dtype in FLOATS:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        low, high = (0, 2) if self.dtype is torch.bool else (0, 100)
        return torch.randint(low, high, shape, generator=generator).to(self.dtype)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy where this rank is to have it: in shared memory or not."""
        shared = self._all_shared if self._shared is None else self._shared[self.own]
        if not shared:
            return tensor.clone()
        return shared_empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def empty(self, count: int) -> torch.Tensor:
        return self.placed(torch.zeros(count, dtype=self.dtype))

    def wait(self, work: Any) -> None:
        if self.asynchronous:
            work.wait()

    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    def reduced(self, name: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The reduction of what the members have, by torch alone, without rounding in between."""
        if name in _BITWISE:
            total = operands[0]
            for operand in operands[1:]:
                total = _BITWISE[name](total, operand)
            return total
        wide = torch.float64 if self.dtype in FLOATS else torch.int64
        stacked = torch.stack([operand.to(wide) for operand in operands])
        total = {"MIN": stacked.amin, "MAX": stacked.amax, "AVG": stacked.mean, "SUM": stacked.sum}[name](0)
        return total.to(self.dtype)  # integers wrap around, and the sum of booleans is whether one is true

    def same(self, found: torch.Tensor, expected: torch.Tensor, exact: bool = True) -> None:
        tolerance = 0.0 if exact or self.dtype not in FLOATS else _TOLERANCES[self.dtype]
        torch.testing.assert_close(found.clone(), expected, rtol=tolerance, atol=tolerance)


def all_reduce(call: Call) -> None:
    name = call.reduction()
    data = call.placed(call.operand(call.own))
    call.wait(dist.all_reduce(data, getattr(dist.ReduceOp, name), **call.options()))
    call.same(data, call.reduced(name, [call.operand(r) for r in range(call.size)]), exact=False)


def reduce(call: Call) -> None:
    name = call.reduction()
    data = call.placed(call.operand(call.own))
    call.wait(dist.reduce(data, group_dst=call.root, op=getattr(dist.ReduceOp, name), **call.options()))
    if call.own == call.root:
        call.same(data, call.reduced(name, [call.operand(r) for r in range(call.size)]), exact=False)


def broadcast(call: Call) -> None:
    data = call.placed(call.operand(call.own))
    call.wait(dist.broadcast(data, group_src=call.root, **call.options()))
    call.same(data, call.operand(call.root))


def all_gather(call: Call) -> None:
    counts = call.uneven(call.size)
    outputs = [call.empty(count) for count in counts]
    call.wait(dist.all_gather(outputs, call.placed(call.operand(call.own, counts[call.own])), **call.options()))
    for owner, output in enumerate(outputs):
        call.same(output, call.operand(owner, counts[owner]))


def all_gather_into_tensor(call: Call) -> None:
    output = call.empty(call.size * call.count)
    call.wait(dist.all_gather_into_tensor(output, call.placed(call.operand(call.own)), **call.options()))
    call.same(output, torch.cat([call.operand(r) for r in range(call.size)]))


def gather(call: Call) -> None:
    is_root = call.own == call.root
    outputs = [call.empty(call.count) for _ in range(call.size)] if is_root else None
    data = call.placed(call.operand(call.own))
    call.wait(dist.gather(data, outputs, group_dst=call.root, **call.options()))
    for owner, output in enumerate(outputs or ()):
        call.same(output, call.operand(owner))


def scatter(call: Call) -> None:
    is_root = call.own == call.root
    inputs = [call.placed(call.operand(call.root, block=r)) for r in range(call.size)] if is_root else None
    output = call.empty(call.count)
    call.wait(dist.scatter(output, inputs, group_src=call.root, **call.options()))
    call.same(output, call.operand(call.root, block=call.own))


def reduce_scatter(call: Call) -> None:
    name = call.reduction()
    inputs = [call.placed(call.operand(call.own, block=r)) for r in range(call.size)]
    output = call.empty(call.count)
    call.wait(dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, name), **call.options()))
    expected = call.reduced(name, [call.operand(r, block=call.own) for r in range(call.size)])
    call.same(output, expected, exact=False)


def reduce_scatter_tensor(call: Call) -> None:
    name = call.reduction()
    whole = call.placed(torch.cat([call.operand(call.own, block=r) for r in range(call.size)]))
    output = call.empty(call.count)
    call.wait(dist.reduce_scatter_tensor(output, whole, getattr(dist.ReduceOp, name), **call.options()))
    expected = call.reduced(name, [call.operand(r, block=call.own) for r in range(call.size)])
    call.same(output, expected, exact=False)


def all_to_all(call: Call) -> None:
    counts = [call.uneven(call.size) for _ in range(call.size)]
    inputs = [call.placed(call.operand(call.own, counts[call.own][r], r)) for r in range(call.size)]
    outputs = [call.empty(counts[r][call.own]) for r in range(call.size)]
    call.wait(dist.all_to_all(outputs, inputs, **call.options()))
    for owner, output in enumerate(outputs):
        call.same(output, call.operand(owner, counts[owner][call.own], call.own))


def all_to_all_single(call: Call) -> None:
    counts = [call.uneven(call.size) for _ in range(call.size)]
    given, taken = counts[call.own], [counts[r][call.own] for r in range(call.size)]
    whole = call.placed(torch.cat([call.operand(call.own, count, r) for r, count in enumerate(given)]))
    output = call.empty(sum(taken))
    call.wait(dist.all_to_all_single(output, whole, taken, given, **call.options()))
    call.same(output, torch.cat([call.operand(r, count, call.own) for r, count in enumerate(taken)]))


def messages(call: Call) -> None:
    """Every member sends to some others, and receives from those that send to it; in any order."""
    pairs = [(a, b) for a in range(call.size) for b in range(call.size) if a != b and call.dice.random() < 0.6]
    counts = {pair: call.dice.randrange(call.count + 1) for pair in pairs}
    posted, received = [], {}
    for pair in call.dice.sample(pairs, len(pairs)):
        source, destination = pair
        if call.own == source:
            data = call.placed(call.operand(source, counts[pair], destination))
            posted.append(dist.isend(data, group=call.group, group_dst=destination))
        elif call.own == destination:
            received[pair] = call.empty(counts[pair])
            posted.append(dist.irecv(received[pair], group=call.group, group_src=source))
    for work in posted:
        work.wait()
    for (source, destination), data in received.items():
        call.same(data, call.operand(source, counts[source, destination], destination))


def send_and_receive(call: Call) -> None:
    """From the root to another one, while the rest does nothing."""
    other = (call.root + 1 + call.dice.randrange(call.size - 1)) % call.size
    if call.own == call.root:
        dist.send(call.placed(call.operand(call.root)), group=call.group, group_dst=other)
    elif call.own == other:
        data = call.empty(call.count)
        dist.recv(data, group=call.group, group_src=call.root)
        call.same(data, call.operand(call.root))


def objects(call: Call) -> None:
    found: list[Any] = [None] * call.size
    dist.all_gather_object(found, {"rank": call.own, "text": "x" * call.count}, group=call.group)
    assert found == [{"rank": r, "text": "x" * call.count} for r in range(call.size)]


def barrier(call: Call) -> None:
    call.wait(dist.barrier(**call.options()))


OPERATIONS: tuple[Callable[[Call], None], ...] = (
    *(all_reduce, all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter),
    *(reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, messages, send_and_receive),
    *(objects, barrier),
)
