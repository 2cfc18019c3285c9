"""The grid of the processes."""

from __future__ import annotations

import numpy as np
import pytest

from accelerate_cpp.comm.mesh import AXES, Mesh, mesh_of
from accelerate_cpp.errors import InvalidArgument


def test_places_are_those_of_torchs_mesh() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 2}
    grid = np.arange(24).reshape([sizes.get(axis, 1) for axis in AXES])  # as init_device_mesh numbers the ranks
    for rank in range(24):
        mesh = Mesh(rank, sizes)
        assert [mesh.place(axis) for axis in AXES] == [int(place[0]) for place in np.where(grid == rank)]


def test_ranks_that_share_layers_or_a_pipeline_get_the_same_batches() -> None:
    places = [Mesh(rank, {"pp": 2, "dp_shard": 2, "tp": 2}) for rank in range(8)]
    assert [mesh.data_rank for mesh in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {mesh.data_size for mesh in places} == {2}
    assert {mesh.world_size for mesh in places} == {8}


def test_copies_and_shards_get_different_batches() -> None:
    assert [Mesh(rank, {"dp_replicate": 2, "dp_shard": 2}).data_rank for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("shards", "axis"), [(False, "dp_replicate"), (True, "dp_shard")])
def test_without_sizes_all_processes_have_copies_or_shards(shards: bool, axis: str) -> None:
    mesh = mesh_of({"tp": 1}, 2, 3, shards)
    assert (mesh.size(axis), mesh.place(axis), mesh.data_rank, mesh.data_size) == (3, 2, 2, 3)


def test_sizes_for_another_number_of_processes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"of 6 processes \(dp_replicate 2 × dp_shard 3\), but 4 run"):
        mesh_of({"dp_replicate": 2, "dp_shard": 3}, 0, 4, shards=True)


def test_of_processes_that_split_a_model_one_counts() -> None:
    mesh = Mesh(0, {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2})
    assert mesh.one_rank_per_batch() == [0, 2, 4, 6]
    assert Mesh(1, {"dp_shard": 3}).one_rank_per_batch() == [0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        ([0, 1], ("tp",)),
        ([0, 2], ("dp_shard",)),
        ([1, 13], ("pp",)),
        ([0, 2, 4, 6, 8, 10], ("dp_replicate", "dp_shard")),
        (range(24), ("pp", "dp_replicate", "dp_shard", "tp")),
        ([5], ()),
    ],
)
def test_a_group_is_along_the_axes_on_which_its_ranks_differ(ranks: list[int], axes: tuple[str, ...]) -> None:
    mesh = Mesh(3, {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 2})
    assert mesh.axes_among(ranks) == axes
