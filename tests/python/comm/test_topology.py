"""Which process this is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from accelerate_cpp.comm.topology import Topology, local_rank_before_connecting, local_rank_of, read_topology


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group_of_four() -> Iterator[None]:
    """Rank 2 of 4 in a group that never communicates."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake_backend() -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")


def test_without_a_process_group_there_is_one_process() -> None:
    assert read_topology("cpu") == Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, backend=None)


@pytest.mark.parametrize(
    ("environ", "local_rank", "local_world_size"),
    [
        ({}, 2, 4),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 0, 2),
        ({"LOCAL_WORLD_SIZE": "2"}, 0, 2),
        ({"LOCAL_RANK": "1"}, 1, 4),
        ({"LOCAL_SIZE": "2"}, 0, 2),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "4"}, 0, 2),
    ],
)
@pytest.mark.usefixtures("fake_backend", "group_of_four")
def test_the_group_gives_the_rank_and_the_environment_the_place_on_the_host(
    environ: dict[str, str], local_rank: int, local_world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    topology = read_topology("cpu")
    assert (topology.rank, topology.world_size) == (2, 4)
    assert (topology.local_rank, topology.local_world_size) == (local_rank, local_world_size)
    assert local_rank_before_connecting() == local_rank
    assert topology.backend == "fake"


def test_before_connecting_the_rank_stands_in_for_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_rank_before_connecting() == 0
    monkeypatch.setenv("RANK", "5")
    assert local_rank_before_connecting() == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_rank_before_connecting() == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank_before_connecting() == 3


def test_ranks_are_numbered_host_by_host() -> None:
    assert [local_rank_of(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
