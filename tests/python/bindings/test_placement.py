"""Placement as Python sees it; the rules themselves are tested beside the core."""

from __future__ import annotations

import pytest

from accelerate_cpp._native import any_fit, balanced_partition, choose_device
from accelerate_cpp.errors import InvalidArgument


@pytest.mark.parametrize(
    ("force_cpu", "forced", "local_rank", "accelerators", "expected"),
    [
        (False, "", 3, [("cuda", 8, True)], "cuda:3"),
        (False, "", 5, [("mps", 1, False)], "mps"),
        (False, "", 0, [], "cpu"),
        (True, "", 0, [("cuda", 8, True)], "cpu"),
        (True, "cuda:1", 0, [("cuda", 8, True)], "cuda:1"),
        (False, "meta", 0, [], "meta"),
    ],
)
def test_a_request_gives_the_name_of_a_device(
    force_cpu: bool, forced: str, local_rank: int, accelerators: list[tuple[str, int, bool]], expected: str
) -> None:
    chosen = choose_device(force_cpu=force_cpu, forced=forced, local_rank=local_rank, accelerators=accelerators)
    assert chosen == expected


def test_its_errors_are_invalid_arguments() -> None:
    with pytest.raises(InvalidArgument, match="'cuda:8' is not present; this process sees cpu, 8 x cuda"):
        choose_device(force_cpu=False, forced="cuda:8", local_rank=0, accelerators=[("cuda", 8, True)])


def test_its_arguments_have_names() -> None:
    with pytest.raises(TypeError):
        choose_device(False, "", 0, [])  # type: ignore[misc]


def test_blocks_are_shared_out_in_order_or_in_any() -> None:
    assert balanced_partition(block_bytes=[1, 1, 2, 4], capacities=[10, 10]) == [0, 0, 0, 1]
    assert balanced_partition(block_bytes=[2, 3, 2], capacities=[4, 3]) is None
    assert any_fit(block_bytes=[2, 3, 2], capacities=[4, 3], most_steps=100) == [0, 1, 0]
    assert any_fit(block_bytes=[2, 3, 2], capacities=[4, 2], most_steps=100) is None
    halves = {"block_bytes": [50] * 8, "capacities": [1000] * 3, "modules": [(0, 2), (2, 4), (4, 6), (6, 8)]}
    assert balanced_partition(**halves) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert balanced_partition(**halves, tolerance=0.5) == [0, 0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(InvalidArgument, match="a module of the blocks from 0 to before 3: there are 1"):
        balanced_partition(block_bytes=[1], capacities=[1], modules=[(0, 3)])
    with pytest.raises(InvalidArgument, match="-1 bytes"):
        balanced_partition(block_bytes=[-1], capacities=[1])
