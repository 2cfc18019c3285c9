"""Checks of what two ranks send each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from features_common import Ranks, check

COUNTS = (1, 1000, 700_001)
ANY_MESSAGES = 3


def send_and_receive(ranks: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for count in COUNTS:
            expected = ranks.values(count, 0).to(dtype)
            data = expected.clone() if ranks.rank == 0 else torch.empty_like(expected)
            if ranks.rank == 0:
                dist.send(data, 1)
                data.zero_()
                dist.recv(data, 1)
            else:
                assert dist.recv(data, 0) == 0
                check(data, expected)
                dist.send(data, 0)
            check(data, expected)


def crossing_orders(ranks: Ranks) -> None:
    """Ranks post the same messages in opposite orders, told apart by tags, and wait in a third order."""
    peer = 1 - ranks.rank
    tags = range(6) if ranks.rank == 0 else range(5, -1, -1)
    received = {tag: torch.empty(100 * tag + 1) for tag in tags}
    works = [dist.isend(ranks.values(100 * tag + 1) + tag, peer, tag=tag) for tag in tags]
    works += [dist.irecv(received[tag], peer, tag=tag) for tag in reversed(tags)]
    for work in works[::2] + works[1::2]:
        work.wait()
    for tag, data in received.items():
        check(data, ranks.values(100 * tag + 1, peer) + tag)


def same_tag(ranks: Ranks) -> None:
    """Messages of one tag arrive in the order in which they were sent."""
    if ranks.rank == 0:
        works = [dist.isend(torch.tensor([float(index)]), 1, tag=3) for index in range(20)]
    else:
        received = [torch.empty(1) for _ in range(20)]
        works = [dist.irecv(data, 0, tag=3) for data in received]
    for work in works:
        work.wait()
    if ranks.rank == 1:
        check(torch.cat(received), torch.arange(20.0))


def both_send_first(ranks: Ranks) -> None:
    """A send is over when the data is on its way, whether or not the peer has posted its receive."""
    for count in COUNTS:
        received = torch.empty(count)
        dist.send(ranks.values(count), 1 - ranks.rank)
        dist.recv(received, 1 - ranks.rank)
        check(received, ranks.values(count, 1 - ranks.rank))


def any_source(ranks: Ranks) -> None:
    """Each of the others sends as many messages; the receiver is told whose each is."""
    if ranks.rank > 0:
        for index in range(ANY_MESSAGES):
            dist.send(torch.tensor([ranks.rank, index]), 0, tag=7)
        return
    came: dict[int, list[int]] = {rank: [] for rank in range(1, ranks.size)}
    for _ in range(ANY_MESSAGES * (ranks.size - 1)):
        data = torch.empty(2, dtype=torch.int64)
        source = dist.recv(data, tag=7)
        assert source == data[0]
        came[source].append(int(data[1]))
    assert came == {rank: list(range(ANY_MESSAGES)) for rank in range(1, ranks.size)}


def batched(ranks: Ranks) -> None:
    """A ring in both directions, receives listed first on even ranks; all in one batch."""
    right, left = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for count in COUNTS:
        from_left, from_right = torch.empty(count), torch.empty(count)
        operations = [
            dist.P2POp(dist.irecv, from_left, left, tag=1),
            dist.P2POp(dist.irecv, from_right, right, tag=2),
            dist.P2POp(dist.isend, ranks.values(count), right, tag=1),
            dist.P2POp(dist.isend, ranks.values(count) + 1, left, tag=2),
        ]
        for work in dist.batch_isend_irecv(operations if ranks.rank % 2 else operations[::-1]):
            work.wait()
        check(from_left, ranks.values(count, left))
        check(from_right, ranks.values(count, right) + 1)


def batched_without_tags(ranks: Ranks) -> None:
    """Two messages each way between neighbours, matched by their order."""
    peer = ranks.rank ^ 1
    received = [torch.empty(3), torch.empty(5)]
    operations = [dist.P2POp(dist.isend, ranks.values(len(data)), peer) for data in received]
    operations += [dist.P2POp(dist.irecv, data, peer) for data in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check(received, [ranks.values(3, peer), ranks.values(5, peer)])


def beside_collectives(ranks: Ranks) -> None:
    """Messages under way while collectives run, in another order on each rank."""
    peer = 1 - ranks.rank
    received, total = torch.empty(1000), ranks.values(1000)
    receiving = dist.irecv(received, peer)
    if ranks.rank == 0:
        sending = dist.isend(ranks.values(1000), peer)
        reducing = dist.all_reduce(total, async_op=True)
    else:
        reducing = dist.all_reduce(total, async_op=True)
        sending = dist.isend(ranks.values(1000), peer)
    dist.barrier()
    for work in (receiving, reducing, sending):
        work.wait()
    check(received, ranks.values(1000, peer))
    check(total, ranks.total(1000))


def in_a_subgroup(ranks: Ranks) -> None:
    """Ranks are named by their place in the world, or in the group."""
    members = [3, 1]
    group = dist.new_group(members)
    if ranks.rank not in members:
        return
    data = ranks.values(10)
    if ranks.rank == 1:
        dist.send(data, 3, group=group)
        dist.send(data + 1, group=group, group_dst=dist.get_group_rank(group, 3))
    else:
        dist.recv(data, 1, group=group)
        check(data, ranks.values(10, 1))
        dist.recv(data, group=group, group_src=dist.get_group_rank(group, 1))
        check(data, ranks.values(10, 1) + 1)


def objects(ranks: Ranks) -> None:
    sent = [{"text": "x" * 100_000}, None, 3]
    if ranks.rank == 0:
        dist.send_object_list(sent, dst=1)
        return
    received = [None, None, None]
    assert dist.recv_object_list(received, src=0) == 0
    assert received == sent
