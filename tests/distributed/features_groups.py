"""Checks of process groups: subsets, several side by side, timeouts, debugging, device meshes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from features_common import TIMEOUT, Ranks, check, refused

SOON = timedelta(milliseconds=200)
TIMED_OUT = ("imed out", "nothing came for", "for an asynchronous operation")


def subset(ranks: Ranks) -> None:
    """Ranks keep their order within a group, however they are listed; others have no part in it."""
    members = [3, 0, 2]
    group = dist.new_group(members)
    if ranks.rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        return
    ordered = sorted(members)
    assert dist.get_process_group_ranks(group) == ordered
    assert dist.get_rank(group) == ordered.index(ranks.rank)
    data = ranks.values(100)
    dist.all_reduce(data, group=group)
    check(data, torch.stack([ranks.values(100, rank) for rank in members]).sum(0))
    parts = [torch.empty(5) for _ in members]
    dist.all_gather(parts, ranks.values(5), group=group)
    check(parts, [ranks.values(5, rank) for rank in ordered])
    dist.broadcast(data, 3, group=group)
    dist.destroy_process_group(group)


def group_of_one(ranks: Ranks) -> None:
    groups = [dist.new_group([rank]) for rank in range(ranks.size)]
    own = groups[ranks.rank]
    data, whole = ranks.values(5), torch.empty(5)
    dist.all_reduce(data, group=own)
    dist.all_gather_into_tensor(whole, data, group=own)
    dist.all_to_all_single(data, whole, group=own)
    dist.barrier(group=own)
    check(data, ranks.values(5))


def subgroups(ranks: Ranks) -> None:
    halves, _ = dist.new_subgroups(2)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    for group, peer in ((halves, ranks.rank ^ 1), (crossed, ranks.rank ^ 2)):
        data = ranks.values(10)
        dist.all_reduce(data, group=group)
        check(data, ranks.values(10) + ranks.values(10, peer))


def made_by_members_only(ranks: Ranks) -> None:
    """``use_local_synchronization``: the others do not even call ``new_group``."""
    if ranks.rank in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        data = ranks.values(10)
        dist.all_reduce(data, group=group)
        check(data, ranks.values(10, 1) + ranks.values(10, 2))


def overlapping(ranks: Ranks) -> None:
    """Ranks of two groups use them in opposite orders, with handles, so that neither order may block the other."""
    first, second = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    sums = {first: ranks.values(1000), second: ranks.values(1000)}
    order = {0: [first], 1: [first, second], 2: [second, first], 3: [second]}[ranks.rank]
    for work in [dist.all_reduce(sums[group], group=group, async_op=True) for group in order]:
        work.wait()
    for group, members in ((first, [0, 1, 2]), (second, [1, 2, 3])):
        if ranks.rank in members:
            check(sums[group], torch.stack([ranks.values(1000, rank) for rank in members]).sum(0))


def gloo_beside(ranks: Ranks) -> None:
    """A group over Gloo beside this backend's, both at work at once."""
    gloo = dist.new_group(backend="gloo")
    ours, theirs = ranks.values(1000), ranks.values(1000)
    works = [dist.all_reduce(ours, async_op=True), dist.all_reduce(theirs, group=gloo, async_op=True)]
    for work in works if ranks.rank == 0 else works[::-1]:
        work.wait()
    check(ours, ranks.total(1000))
    check(theirs, ranks.total(1000))


def begun_again(ranks: Ranks) -> None:
    """The default group ends and another one begins in the same process."""
    for turn in range(3):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"turn {turn}", ranks.store)
        dist.init_process_group(ranks.name, store=store, rank=ranks.rank, world_size=ranks.size, timeout=TIMEOUT)
        data = ranks.values(10)
        dist.all_reduce(data)
        check(data, ranks.total(10))


def timeout_of_group(ranks: Ranks) -> None:
    """Long enough for the group to be made on a busy machine."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    if ranks.rank == 0:
        with refused(*TIMED_OUT):
            dist.all_reduce(torch.ones(1), group=group)
        ranks.tell("timed out")
    ranks.wait_for("timed out")


def timeout_is_kept(ranks: Ranks) -> None:
    def of(group: dist.ProcessGroup) -> timedelta:
        backend = group._get_backend(torch.device("cpu"))
        return backend.options._timeout if ranks.backend == "gloo" else backend.timeout

    assert of(dist.group.WORLD) == TIMEOUT
    assert of(dist.new_group(timeout=TIMEOUT * 2)) == TIMEOUT * 2


def timeout_of_call(ranks: Ranks) -> None:
    """The timeout in the options of one call, the rest of the group's being long."""
    group = dist.new_group()
    if ranks.rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = SOON
        with refused(*TIMED_OUT):
            group.allreduce([torch.ones(1)], options).wait()
        ranks.tell("timed out")
    ranks.wait_for("timed out")


def timeout_of_wait(ranks: Ranks) -> None:
    group = dist.new_group()
    if ranks.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with refused(*TIMED_OUT):
            work.wait(SOON)
        ranks.tell("timed out")
    ranks.wait_for("timed out")


def monitored_barrier(ranks: Ranks) -> None:
    """Passes when all come; names the rank that does not."""
    dist.group.WORLD.monitored_barrier(TIMEOUT, wait_all_ranks=True)
    group = dist.new_group()
    if ranks.rank == 0:
        with refused("Rank 1", "Ranks 1", "rank 1", "Rank(s) 1"):
            group.monitored_barrier(SOON, wait_all_ranks=True)
        ranks.tell("given up")
    ranks.wait_for("given up")


def monitored_barrier_function_refused(ranks: Ranks) -> None:
    with refused("monitored_barrier is only implemented for GLOO backend", kind=ValueError):
        dist.monitored_barrier()


def debug_detail(ranks: Ranks) -> None:
    """torch's own checks around the backend, and what they say when ranks disagree."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(level)
    data, parts = ranks.values(10), [torch.empty(10) for _ in range(ranks.size)]
    dist.all_reduce(data, group=group)
    check(data, ranks.total(10))
    dist.all_gather(parts, ranks.values(10), group=group)
    check(parts, ranks.everyone(10))
    with refused("Detected mismatch between collectives on ranks"):
        dist.all_reduce(torch.ones(1 + ranks.rank), group=group)


def mesh_in_two_dimensions(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, 2, names=("dp", "tp"))
    row, column = divmod(ranks.rank, 2)
    assert list(mesh.get_coordinate()) == [row, column]
    for name, peer in (("dp", ranks.rank ^ 2), ("tp", ranks.rank ^ 1)):
        for group in (mesh.get_group(name), mesh[name].get_group()):
            data = ranks.values(10)
            dist.all_reduce(data, group=group)
            check(data, ranks.values(10) + ranks.values(10, peer))
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) == (row, column)


def mesh_in_three_dimensions(ranks: Ranks) -> None:
    """Slices of two dimensions, and dimensions merged into one."""
    mesh = ranks.mesh(2, 1, 2, names=("pp", "dp", "tp"))
    assert mesh["pp", "tp"].shape == (2, 2)
    merged = mesh["dp", "tp"]._flatten("both")
    assert merged.size() == 2
    data = ranks.values(10)
    dist.all_reduce(data, group=merged.get_group())
    check(data, ranks.values(10) + ranks.values(10, ranks.rank ^ 1))


def mesh_from_groups(ranks: Ranks) -> None:
    group, _ = dist.new_subgroups(2)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    data = ranks.values(10)
    dist.all_reduce(data, group=mesh.get_group("tp"))
    check(data, ranks.values(10) + ranks.values(10, ranks.rank ^ 1))


def split_group_refused(ranks: Ranks) -> None:
    with refused("No device associated with the default pg", kind=RuntimeError):
        dist.split_group(split_ranks=[[0], [1]])


def shrink_group_refused(ranks: Ranks) -> None:
    with refused("does not support shrinking operations"):
        dist.shrink_group([1])
