"""The processes of a group that share a host, and the memory that they have in common."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from faults import await_true
from network_namespaces import ADDRESSES, Host
from processes import files_in_shared_memory, run_processes, start_processes
from scenarios import outlive_the_others


def write_into_a_window(backend: str) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup

    state = PartialState(cpu=True, backend=backend)
    group = HostGroup()
    ranks = list(range(state.num_processes))
    assert (group.hosts, group.host, group.ranks, group.rank) == ([ranks], 0, ranks, state.process_index)
    assert [group.receiver(rank) for rank in ranks] == [None] * len(ranks)
    window = group.window(1000)
    assert window.dtype == torch.uint8
    assert window.count_nonzero() == 0
    group.barrier()
    window[state.process_index] = state.process_index + 1
    group.barrier()
    assert window[: len(ranks)].tolist() == [rank + 1 for rank in ranks]
    kept = window[: len(ranks)]
    del window
    dist.destroy_process_group()
    assert kept.tolist() == [rank + 1 for rank in ranks]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_of_one_host_see_what_each_writes(backend: str) -> None:
    run_processes(write_into_a_window, 3, backend)


def share_with_some() -> None:
    import torch.distributed as dist

    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup

    state = PartialState(cpu=True)
    rank = state.process_index
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = HostGroup(pairs[rank // 2])
    assert (group.ranks, group.rank) == ([0, 1], rank % 2)
    window = group.window(4)
    window[rank % 2] = rank
    group.barrier()
    assert window[:2].tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    state.wait_for_everyone()  # rank 0 has the store


def test_each_group_has_its_own() -> None:
    run_processes(share_with_some, 4)


def killed_in_a_pair() -> str:
    import signal

    import torch.distributed as dist

    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup
    from accelerate_cpp.errors import PeerLost

    state = PartialState(cpu=True)
    rank = state.process_index
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = HostGroup(pairs[rank // 2])
    state.wait_for_everyone()  # rank 0 has the store
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < 2:
        return ""
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    return str(caught.value)


def test_a_lost_one_is_named_by_its_number_among_all() -> None:
    message = start_processes(killed_in_a_pair, 4)[2].value
    assert message is not None
    assert set(re.findall(r"rank (\d)", message)) == {"2", "3"}, message
    assert "rank 3 has ended" in message


def ask_for_too_much() -> None:
    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup
    from accelerate_cpp.errors import SystemFailure

    PartialState(cpu=True)
    group = HostGroup()
    with pytest.raises(SystemFailure, match=str(1 << 50)):
        group.window(1 << 50)
    assert group.window(1).tolist() == [0]


def test_too_little_memory_is_an_error_of_all_and_of_this_call_alone() -> None:
    run_processes(ask_for_too_much, 2)


def find_receivers(hosts: tuple[Host, Host], layout: tuple[int, ...]) -> list[int | None]:
    hosts[layout[int(os.environ["RANK"])]].enter()
    import torch.distributed as dist

    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup

    PartialState(cpu=True)
    group = HostGroup()
    assert group.ranks == [rank for rank, host in enumerate(layout) if host == layout[group.rank]]
    found = [group.receiver(rank) for rank in range(len(layout))]
    outlive_the_others(dist.distributed_c10d._get_default_store(), dist.get_rank(), len(layout))
    return found


def test_what_another_host_sends_is_received_by_one_of_this(hosts: tuple[Host, Host]) -> None:
    layout = (0, 0, 1)
    found = run_processes(find_receivers, 3, hosts, layout, environment={"MASTER_ADDR": ADDRESSES[0]})
    assert found == [[None, None, 0], [None, None, 0], [2, 2, None]]


def end_by_force(folder: str) -> None:
    import signal

    from accelerate_cpp import PartialState
    from accelerate_cpp.comm.host_group import HostGroup

    state = PartialState(cpu=True)
    HostGroup().window(1 << 20)
    (Path(folder) / str(state.process_index)).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_where_all_are_killed(tmp_path: Path) -> None:
    before = files_in_shared_memory()
    with pytest.raises(AssertionError, match="exit code"):
        run_processes(end_by_force, 2, str(tmp_path))
    # Processes of other tests may have some for a moment.
    await_true(lambda: files_in_shared_memory() <= before, "the shared memory to go")
