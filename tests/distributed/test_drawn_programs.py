"""Training programs that are drawn, in real processes, compared with plain torch and one all-reduce for each gradient.

ACCELERATE_CPP_TEST_PROGRAMS says how many programs each of the long tests runs (40 unless it is set), and
ACCELERATE_CPP_TEST_SEED which comes first. A failure names its seed, and the smallest program found that still fails;
ACCELERATE_CPP_TEST_PROGRAM names a file with such a text, which then is all that is run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawn_programs import Pass, Program, Step, draw, is_allowed, parse, shrink, smaller, text
from network_namespaces import ADDRESSES, Host
from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SEED = int(os.environ.get("ACCELERATE_CPP_TEST_SEED", "1"))
PROGRAMS = int(os.environ.get("ACCELERATE_CPP_TEST_PROGRAMS", "40"))
# Ours over shared memory, and over Gloo between ranks that do not share memory; ours through a process group, as on
# accelerators; and torch's own wrapper, as prepared with backend Gloo, whose gradients we weigh, clip and un-scale.
WAYS = [("shm", 2), ("shm", 3), ("apart", 2), ("apart", 3), ("device", 2), ("device", 3), ("torch", 2)]
LAYOUTS = [(0, 1), (0, 0, 1), (0, 1, 0, 1)]


def stay(rank: int) -> None:
    """This rank runs where it is."""


def enter_host(hosts: tuple[Host, Host], layout: tuple[int, ...], rank: int) -> None:
    hosts[layout[rank]].enter()


def run_programs(way: str, first_seed: int, count: int, only: Program | None, enter: Callable[[int], None]) -> Any:
    import drawn_runs

    return drawn_runs.run_on_this_rank(way, first_seed, count, only, enter)


def all_do_what_plain_torch_does(
    way: str, ranks: int, count: int, enter: Callable[[int], None] = stay, **options: Any
) -> None:
    path = os.environ.get("ACCELERATE_CPP_TEST_PROGRAM")
    only = parse(Path(path).read_text()) if path else None
    if only and only.ranks != ranks:
        pytest.skip(f"the program in {path} is for {only.ranks} ranks")
    reports = run_processes(run_programs, ranks, way, SEED, count, only, enter, **options)
    if any(program for _, program in reports):
        failures = [f"--- rank {rank}: {failure}" for rank, (failure, _) in enumerate(reports)]
        pytest.fail("\n".join([*failures, reports[0][1]]), pytrace=False)


def test_over_shared_memory() -> None:
    all_do_what_plain_torch_does("shm", 2, 5)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "ranks"), WAYS, ids=lambda value: str(value))
def test_many(way: str, ranks: int) -> None:
    all_do_what_plain_torch_does(way, ranks, PROGRAMS, timeout=1100)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_many_on_two_hosts(hosts: tuple[Host, Host], layout: tuple[int, ...]) -> None:
    all_do_what_plain_torch_does(
        "hosts",
        len(layout),
        PROGRAMS,
        partial(enter_host, hosts, layout),
        timeout=1100,
        environment={"MASTER_ADDR": ADDRESSES[0]},
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_program_is_read_from_its_text(seed: int) -> None:
    program = draw(seed, 3)
    assert is_allowed(program)
    assert parse(text(program)) == program == draw(seed, 3) != draw(seed + 1, 3)


def test_a_program_shrinks_to_what_matters() -> None:
    def fails(program: Program) -> bool:
        passes = [one for step in program.steps for one in step.passes if step.clear == "kept"]
        return any(any("b1" in names for names in one.unused) for one in passes)

    programs = [program for program in (draw(seed, 2) for seed in range(200)) if fails(program)]
    assert len(programs) > 5
    for program in programs[:5]:
        small = shrink(program, fails, most_runs=10_000)
        assert fails(small)
        assert not any(map(fails, smaller(small)))
        assert [branch.name for branch in small.branches] in (["b1"], ["b0", "b1"])
        (step,) = small.steps
        unused = [("b1",), ()]
        assert step in [Step((Pass(unused=tuple(one)),), clear="kept") for one in (unused, unused[::-1])], text(small)
