from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia-uvm", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_only_numbered_nvidia_devices_are_gpus(devices: Path) -> None:
    assert host_resources.gpu_count({}, devices) == 3


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("1", 1), ("0,2", 2), ("0,-1,2", 1), ("GPU-a,GPU-b", 2), ("0,1,2,3", 3)]
)
def test_visible_devices_narrow_the_gpus_that_are_there(devices: Path, visible: str, count: int) -> None:
    assert host_resources.gpu_count({"CUDA_VISIBLE_DEVICES": visible}, devices) == count


def test_visible_devices_conjure_up_no_gpu(tmp_path: Path) -> None:
    assert host_resources.gpu_count({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def _cgroup(tmp_path: Path, limits: dict[str, str]) -> tuple[Path, Path]:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n0::/box/job\n")
    root = tmp_path / "cgroup"
    (root / "box" / "job").mkdir(parents=True)
    for folder, text in limits.items():
        (root / folder / "cpu.max").write_text(text)
    return root, own


def test_tightest_quota_on_the_way_to_the_root_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    limits = {"box/job": "max 100000\n", "box": "450000 100000\n", ".": "900000 100000\n"}
    assert host_resources.usable_cores(*_cgroup(tmp_path, limits)) == 4


def test_quota_of_version_1_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,cpuacct:/box/job\n0::/\n")
    for folder, quota, period in (("box/job", "-1", "100000"), ("box", "150000", "50000"), (".", "400000", "100000")):
        group = tmp_path / "cgroup" / "cpu" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert host_resources.usable_cores(tmp_path / "cgroup", own) == 3


def test_quota_below_one_core_still_gives_one(tmp_path: Path) -> None:
    assert host_resources.usable_cores(*_cgroup(tmp_path, {"box/job": "20000 100000\n"})) == 1


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert host_resources.usable_cores(tmp_path, tmp_path / "absent") == len(os.sched_getaffinity(0))


def test_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", host_resources.free_port()))


def test_free_port_is_none_that_the_kernel_gives_to_connections(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("21000\t60999\n")
    assert 20000 <= host_resources.free_port(tmp_path / "range") < 21000
    assert 20000 <= host_resources.free_port(tmp_path / "absent") < 30000


def test_free_port_is_one_of_the_kernels_where_it_has_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all").write_text("1024 65535")
    assert host_resources.free_port(tmp_path / "all") >= 1024
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))  # of one address of this host only; workers listen on all
        taken = server.getsockname()[1]
        monkeypatch.setattr(host_resources, "_PORTS", range(taken, taken + 1))
        assert host_resources.free_port(tmp_path / "absent") != taken


def test_port_of_another_program_is_refused_with_the_flag_that_changes_it() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        port = other.getsockname()[1]
        other.listen()
        with pytest.raises(InvalidArgument, match=rf"port {port} .*--main_process_port on all machines"):
            host_resources.require_port(port)
    host_resources.require_port(port)


def test_several_workers_are_refused_where_the_system_calls_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InvalidArgument, match="num_processes=2 needs Linux"):
        host_resources.require_supervision(2)


def test_several_workers_are_refused_where_a_sandbox_forbids_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not host_resources.can_supervise()
