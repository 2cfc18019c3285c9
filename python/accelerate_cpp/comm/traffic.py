"""What a process has asked its groups for: operations and bytes, by axes of the mesh and by kind of operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.errors import InvalidArgument

__all__ = ["Count", "Traffic", "counting", "traffic_of"]

Axes = tuple[str, ...]


class Count(NamedTuple):
    """Operations of one kind, and the bytes that this rank put into them; of those that it received, what arrived."""

    operations: int
    size_bytes: int


Traffic = dict[Axes, dict[str, Count]]
"""By the axes of the mesh along which the ranks of a group differ, and by kind: ``"all_reduce"``, ``"reduce_scatter"``,
``"broadcast"``, ``"all_gather"``, ``"all_to_all"``, ``"send"``, ``"receive"``, ``"barrier"``, …"""


def traffic_of(mesh: Mesh) -> Traffic:
    """What this process has asked for since its groups exist. Groups of one process are left out.

    Gradients that ``DataParallel`` averages travel in buckets, which are no operations of a group: its reducer tells
    ``bucket_sizes_bytes``.

    Raises:
        InvalidArgument: a group is of another backend than ours, which counts nothing.
    """
    found: Traffic = {}
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if not isinstance(group, dist.ProcessGroup) or len(ranks) < 2:  # of groups without this rank there are marks
            continue
        kinds = found.setdefault(mesh.axes_among(ranks), {})
        for kind, (operations, size_bytes) in _backend_of(group).traffic.items():
            before = kinds.get(kind, Count(0, 0))
            kinds[kind] = Count(before.operations + operations, before.size_bytes + size_bytes)
    return found


@contextmanager
def counting(mesh: Mesh) -> Iterator[Traffic]:
    """What this process asks for within the block; the value is filled when it ends.

    Raises:
        InvalidArgument: as :func:`traffic_of`.
    """
    before = traffic_of(mesh)
    found: Traffic = {}
    yield found
    for axes, kinds in traffic_of(mesh).items():
        difference = _difference(kinds, before.get(axes, {}))
        if difference:
            found[axes] = difference


def _difference(after: Mapping[str, Count], before: Mapping[str, Count]) -> dict[str, Count]:
    found = {}
    for kind, count in after.items():
        earlier = before.get(kind, Count(0, 0))
        if count.operations > earlier.operations:
            found[kind] = Count(count.operations - earlier.operations, count.size_bytes - earlier.size_bytes)
    return found


def _backend_of(group: dist.ProcessGroup) -> C10dBackend:
    backend: Any = None
    if any(device.type == "cpu" for device in group._device_types):
        backend = group._get_backend(torch.device("cpu"))
    if not isinstance(backend, C10dBackend):
        raise InvalidArgument(
            f"traffic_of: a group of {group.size()} processes has the backend {dist.get_backend_config(group)!r}, and "
            "only 'shm' counts operations; run on CPUs of Linux without another backend"
        )
    return backend
