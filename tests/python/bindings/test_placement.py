"""choose_device as Python sees it; the rules themselves are tested beside the core."""

from __future__ import annotations

import pytest

from accelerate_cpp._native import choose_device
from accelerate_cpp.errors import InvalidArgument


@pytest.mark.parametrize(
    ("force_cpu", "forced", "local_rank", "accelerators", "expected"),
    [
        (False, "", 3, [("cuda", 8)], "cuda:3"),
        (False, "", 5, [("mps", 1)], "mps"),
        (False, "", 0, [], "cpu"),
        (True, "", 0, [("cuda", 8)], "cpu"),
        (True, "cuda:1", 0, [("cuda", 8)], "cuda:1"),
        (False, "meta", 0, [], "meta"),
    ],
)
def test_a_request_gives_the_name_of_a_device(
    force_cpu: bool, forced: str, local_rank: int, accelerators: list[tuple[str, int]], expected: str
) -> None:
    chosen = choose_device(force_cpu=force_cpu, forced=forced, local_rank=local_rank, accelerators=accelerators)
    assert chosen == expected


def test_its_errors_are_invalid_arguments() -> None:
    with pytest.raises(InvalidArgument, match="'cuda:8' is not present; this process sees cpu, 8 x cuda"):
        choose_device(force_cpu=False, forced="cuda:8", local_rank=0, accelerators=[("cuda", 8)])


def test_its_arguments_have_names() -> None:
    with pytest.raises(TypeError):
        choose_device(False, "", 0, [])  # type: ignore[misc]
