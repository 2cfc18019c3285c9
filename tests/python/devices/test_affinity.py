"""Which cores each worker is pinned to, on hosts of all shapes, and pinning itself on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from accelerate_cpp.devices import affinity
from accelerate_cpp.devices.affinity import pin_process, pinned, share_out, shares_of_launch
from accelerate_cpp.devices.cores import Place
from accelerate_cpp.errors import InvalidArgument, SystemFailure

on_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin processes to cores")


def host(nodes: int, physical: int, siblings: int = 1) -> dict[int, Place]:
    """A host with ``physical`` physical cores in each node, numbered as on servers: all first siblings come first."""
    total = nodes * physical
    return {core: Place(core % total // physical, 0, core % total) for core in range(total * siblings)}


HOSTS = {
    "one core": host(1, 1),
    "a laptop": host(1, 4, siblings=2),
    "two sockets": host(2, 8, siblings=2),
    "two sockets of odd size": host(2, 5),
    "four nodes": host(4, 6),
    "what a container was left": {core: place for core, place in host(2, 8, siblings=2).items() if core % 3},
}


@pytest.mark.parametrize("places", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("workers", range(1, 9))
def test_shares_are_disjoint_nearly_equal_use_every_core_and_keep_siblings_together(
    places: dict[int, Place], workers: int
) -> None:
    shares = share_out(places, workers)
    if len(places) < workers:
        assert shares == ()
        return
    assert len(shares) == workers
    assert sorted(core for share in shares for core in share) == sorted(places)
    physical = [{places[core] for core in share} for share in shares]
    enough = len(set(places.values())) >= workers
    sizes = [len(unit) for unit in (physical if enough else shares)]
    assert max(sizes) - min(sizes) <= 1
    if enough:  # no physical core serves two workers
        assert sum(map(len, physical)) == len(set(places.values()))


def test_siblings_are_parted_only_when_there_are_too_few_physical_cores() -> None:
    assert share_out(host(1, 2, siblings=2), 2) == ((0, 2), (1, 3))
    assert share_out(host(1, 2, siblings=2), 3) == ((0,), (2,), (1, 3))
    assert share_out(host(1, 2, siblings=2), 4) == ((0,), (2,), (1,), (3,))


@pytest.mark.parametrize("workers", [2, 4, 6])
def test_shares_end_where_equal_nodes_end(workers: int) -> None:
    places = host(2, 9, siblings=2)
    for share in share_out(places, workers):
        assert len({places[core].node for core in share}) == 1


def test_cores_are_taken_by_node_and_not_by_number() -> None:
    interleaved = {core: Place(core % 2, core % 2, core) for core in range(8)}
    assert share_out(interleaved, 2) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_one_worker_has_all_cores() -> None:
    assert share_out(host(1, 2, siblings=2), 1) == ((0, 2, 1, 3),)


def test_workers_on_gpus_share_the_node_of_their_gpu() -> None:
    places = host(2, 4)
    assert share_out(places, 2, nodes=[1, 0]) == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert share_out(places, 3, nodes=[1, 0, 1]) == ((4, 5), (0, 1, 2, 3), (6, 7))
    assert share_out(places, 2, nodes=[1, 1, 0]) == ((4, 5), (6, 7))


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([0, None], id="a node is unknown"),
        pytest.param([0], id="fewer GPUs than workers"),
        pytest.param([0, 3], id="a node without usable cores"),
        pytest.param([], id="no GPUs"),
    ],
)
def test_where_the_nodes_of_gpus_do_not_help_all_cores_are_shared_out(nodes: list[int | None]) -> None:
    assert share_out(host(2, 2), 2, nodes) == ((0, 1), (2, 3))


def test_a_node_with_fewer_cores_than_workers_on_it_does_not_help() -> None:
    assert share_out(host(2, 2), 4, nodes=[0, 0, 0, 1]) == ((0,), (1,), (2,), (3,))


def test_shares_of_the_cores_of_shares_are_the_same() -> None:
    places = host(3, 4, siblings=2)
    shares = share_out(places, 3, nodes=[0, 2, 0])
    used = {core: places[core] for share in shares for core in share}
    assert share_out(used, 3, nodes=[0, 2, 0]) == shares


def _use(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(affinity, "_usable", lambda: tuple(range(cores)))
    monkeypatch.setattr(affinity, "read_places", lambda cores: {core: Place(0, 0, core) for core in cores})


def test_more_workers_than_cores_are_warned_of_and_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, 2)
    with pytest.warns(UserWarning, match=r"3 processes cannot .* of the 2 .* \(0-1\); nothing is pinned.*at most 2"):
        assert shares_of_launch(3, {}, on_gpus=False) == ()


def test_a_system_that_cannot_pin_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.warns(UserWarning, match="only Linux") as told:
        assert shares_of_launch(2, {}, on_gpus=False) == ()
    assert len(told) == 1


def test_gpus_count_only_for_workers_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_usable", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(affinity, "read_places", lambda cores: host(2, 2))
    monkeypatch.setattr(affinity, "gpu_nodes", lambda environ: [1, 0])
    assert shares_of_launch(2, {}, on_gpus=True) == ((2, 3), (0, 1))
    assert shares_of_launch(2, {}, on_gpus=False) == ((0, 1), (2, 3))


@on_linux
def test_a_thread_is_pinned_within_the_block_and_its_children_stay_so() -> None:
    before = os.sched_getaffinity(0)
    share = (min(before),)
    with pinned(share):
        assert os.sched_getaffinity(0) == set(share)
        child = subprocess.Popen(
            [sys.executable, "-c", "import os, sys; sys.stdin.read(); print(sorted(os.sched_getaffinity(0)))"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert os.sched_getaffinity(0) == before
    assert child.communicate("")[0] == f"{list(share)}\n"


@on_linux
def test_an_empty_share_pins_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pinned(()):
        assert os.sched_getaffinity(0) == before


@on_linux
def test_cores_that_the_system_refuses_are_named() -> None:
    refusal = pytest.raises(SystemFailure, match=r"cannot pin to cores 1000000: .*--enable_cpu_affinity")
    with refusal, pinned((1_000_000,)):
        pass


PINS = """
import json, os, sys, threading
from accelerate_cpp.devices.affinity import pin_process
other, done = threading.Event(), threading.Event()
seen = {}
def work():
    other.set()
    done.wait()
    seen["thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=work)
thread.start()
other.wait()
shares = [pin_process(rank, 2) for rank in (0, 1, 0)]
done.set()
thread.join()
print(json.dumps([shares, sorted(os.sched_getaffinity(0)), seen["thread"]]))
"""


@on_linux
@pytest.mark.parametrize("told", [True, False], ids=["the cores of the launch", "the cores of the process"])
def test_a_process_pins_all_its_threads_and_finds_the_same_shares_each_time(told: bool) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs two cores")
    environ = {name: text for name, text in os.environ.items() if name != "ACCELERATE_CPP_CORES"}
    if told:  # pinned to one of them already, as a launch leaves its workers
        environ["ACCELERATE_CPP_CORES"] = ",".join(map(str, usable))
    with pinned(usable[:1] if told else ()):
        output = subprocess.run(
            [sys.executable, "-c", PINS], env=environ, check=True, capture_output=True, text=True
        ).stdout
    (first, second, again), own, of_thread = json.loads(output)
    assert sorted(first + second) == usable
    assert sorted(again) == sorted(first) == own == of_thread


@pytest.mark.parametrize("local_rank", [2, -1])
def test_a_rank_that_is_not_on_this_host_is_refused(local_rank: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"local rank {local_rank} of 2 .*expected 0 to 1; LOCAL_WORLD_SIZE"):
        pin_process(local_rank, 2, environ={})


def test_only_the_first_process_of_a_host_warns(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    _use(monkeypatch, 1)
    assert pin_process(1, 2, environ={"ACCELERATE_CPP_CORES": "0"}) == []
    assert len(recwarn) == 0
    assert pin_process(0, 2, environ={"ACCELERATE_CPP_CORES": "0"}) == []
    assert [str(warning.message).partition(" cannot")[0] for warning in recwarn] == ["CPU affinity: 2 processes"]
