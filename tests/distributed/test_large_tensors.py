"""More elements than a 32-bit count holds."""

from __future__ import annotations

import pytest

from processes import run_processes
from shm_scenarios import register

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.
COUNT = (1 << 31) + 12345


def move_large_tensors(in_arena: bool) -> list[str]:
    """The names of the operations that gave a wrong result on this rank."""
    import torch

    import accelerate_cpp

    dist = register()
    dist.init_process_group("cpu:shm")
    rank = dist.get_rank()
    empty = accelerate_cpp.shared_empty if in_arena else torch.empty
    data = empty(COUNT, dtype=torch.uint8)
    wrong = []

    def fill(step: int) -> None:
        """Values that tell positions apart, with no power of two in their period."""
        block = 251 * (1 << 20)
        pattern = (torch.arange(block, dtype=torch.int32) % 251 // 2).to(torch.uint8) + step
        for begin in range(0, COUNT, block):
            data[begin : begin + block] = pattern[: COUNT - begin]

    def check(name: str, step: int, part: slice = slice(None), factor: int = 1) -> None:
        found = data.clone()
        fill(step)
        if not torch.equal(found[part], data[part] * factor):
            wrong.append(name)
        data.copy_(found)

    fill(0)
    dist.all_reduce(data)
    check("all_reduce", 0, factor=2)

    fill(rank)
    dist.broadcast(data, 1)
    check("broadcast", 1)

    fill(rank)
    middle = (COUNT + 1) // 2
    halves = [data[:middle], data[middle:]]
    dist.all_gather(halves, halves[rank].clone())
    check("all_gather of rank 0", 0, slice(middle))
    check("all_gather of rank 1", 1, slice(middle, None))

    fill(rank)
    if rank == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
        check("receive", 0)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("in_arena", [False, True])
def test_operations_on_more_than_two_to_the_31_elements(in_arena: bool) -> None:
    assert run_processes(move_large_tensors, 2, in_arena, timeout=900) == [[], []]
