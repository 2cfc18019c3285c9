"""Time over links, and which axes of a mesh leave a host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from accelerate_cpp.comm.mesh import AXES, Mesh
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.links import Links, crosses_hosts, groups_along
from accelerate_cpp.parallel.costs.operations import Operation

MESH = Mesh(0, {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 2})


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp_replicate", "dp_shard"), ("pp", "tp"), ()])
def test_groups_have_the_ranks_that_differ_along_their_axes_alone(axes: tuple[str, ...]) -> None:
    places = {rank: Mesh(rank, MESH.sizes) for rank in range(MESH.world_size)}
    others = [axis for axis in AXES if axis not in axes]
    expected: dict[Any, list[int]] = {}
    for rank, mesh in places.items():
        expected.setdefault(tuple(mesh.place(axis) for axis in others), []).append(rank)
    found = [*groups_along(MESH, axes)]
    assert sorted(found) == sorted(expected.values())
    assert sorted(itertools.chain(*found)) == [*range(24)]


@pytest.mark.parametrize(
    ("axes", "ranks_per_host", "crosses"),
    [
        (("tp",), 2, False),
        (("tp",), 8, False),
        (("tp",), 3, True),  # the pair of ranks 2 and 3
        (("dp_shard",), 6, False),
        (("dp_shard",), 4, True),
        (("pp",), 12, True),
        (("pp",), 24, False),
    ],
)
def test_an_axis_leaves_a_host_if_one_of_its_groups_does(
    axes: tuple[str, ...], ranks_per_host: int, crosses: bool
) -> None:
    assert crosses_hosts(MESH, axes, ranks_per_host) is crosses


def test_time_is_that_of_bytes_and_of_messages_one_after_the_other() -> None:
    links = Links(8, bandwidth_within=2.0, bandwidth_between=1.0, latency_within=10.0, latency_between=100.0)
    given = [Operation(("tp",), 4, "all_reduce", 4_000_000, 5)]
    assert links.seconds(given, False) == pytest.approx(5 * 6_000_000 / 2e9 + 5 * 6 * 10e-6)
    assert links.seconds(given, True) == pytest.approx(5 * 6_000_000 / 1e9 + 5 * 6 * 100e-6)
    assert links.seconds([], True) == 0.0


@pytest.mark.parametrize("wrong", [{"bandwidth_within": 0.0}, {"ranks_per_host": 0}, {"latency_between": -1.0}])
def test_impossible_links_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidArgument, match=f"Links: {name}="):
        Links(**wrong)
