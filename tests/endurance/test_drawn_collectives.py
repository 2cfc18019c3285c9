"""Drawn collectives of real processes do what torch alone does, on one host and over two.

``ACCELERATE_CPP_TEST_COLLECTIVES`` says how many are drawn, ``ACCELERATE_CPP_TEST_SEED`` with which seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest

from network_namespaces import ADDRESSES, Host, Unavailable, two_hosts
from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

OPERATIONS = int(os.environ.get("ACCELERATE_CPP_TEST_COLLECTIVES", "400"))
SEED = int(os.environ.get("ACCELERATE_CPP_TEST_SEED", "1"))
GENEROUS_SECONDS = 120 + OPERATIONS / 5


def draw_and_compare(operations: int, seed: int, hosts: tuple[Host, ...], layout: tuple[int, ...]) -> int:
    """The number of operations in which this rank took part without a wrong element."""
    if hosts:
        hosts[layout[int(os.environ["RANK"])]].enter()
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register
    from drawn_collectives import Ranks

    register()
    dist.init_process_group("cpu:shm", timeout=timedelta(seconds=GENEROUS_SECONDS))
    Ranks(seed).run(operations)
    dist.destroy_process_group()
    return operations


@pytest.mark.timeout(GENEROUS_SECONDS * 2)
@pytest.mark.parametrize("processes", [2, 3])
def test_they_do_what_torch_does_alone(processes: int) -> None:
    done = run_processes(draw_and_compare, processes, OPERATIONS, SEED, (), (), timeout=GENEROUS_SECONDS)
    assert done == [OPERATIONS] * processes


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except Unavailable as reason:
        pytest.skip(f"two hosts cannot be made of this machine: {reason}")


@pytest.mark.long
@pytest.mark.timeout(GENEROUS_SECONDS * 2)
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 0)])
def test_they_do_what_torch_does_alone_over_two_hosts(hosts: tuple[Host, Host], layout: tuple[int, ...]) -> None:
    done = run_processes(
        draw_and_compare,
        len(layout),
        *(OPERATIONS, SEED, hosts, layout),
        timeout=GENEROUS_SECONDS,
        environment={"MASTER_ADDR": ADDRESSES[0]},
    )
    assert done == [OPERATIONS] * len(layout)
