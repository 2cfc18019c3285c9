"""The memory that the machine or the container has left."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from accelerate_cpp.devices.memory import available_bytes


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    return folder


def test_it_is_what_the_machine_has_available(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path) == 8192


def test_it_is_about_what_psutil_says_of_this_machine(tmp_path: Path) -> None:
    assert available_bytes(groups=tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(("limit", "expected"), [("max", 8192), ("5000", 5000 - 3000 + 700), ("2000", 0)])
def test_a_control_group_can_leave_less(limit: str, expected: int, proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/user/job\n")
    job = tmp_path / "groups" / "user" / "job"
    write(job, memory_max=limit, memory_current="3000" if limit != "2000" else "9000")
    (job / "memory.stat").write_text("active_file 5\ninactive_file 700\n")
    assert available_bytes(proc, tmp_path / "groups") == expected


def test_the_groups_around_it_count_too(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/user/job\n")
    write(tmp_path / "groups" / "user" / "job", memory_max="max", memory_current="10")
    write(tmp_path / "groups" / "user", memory_max="1000", memory_current="10")
    assert available_bytes(proc, tmp_path / "groups") == 990


def test_groups_of_the_first_version_are_understood(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/job\n4:memory:/job\n")
    job = tmp_path / "groups" / "memory" / "job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("4000")
    (job / "memory.usage_in_bytes").write_text("1000")
    assert available_bytes(proc, tmp_path / "groups") == 3000


def test_where_the_system_says_nothing_it_is_what_there_is_at_all(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert available_bytes(tmp_path, tmp_path) == pytest.approx(total, rel=0.05)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    script = """
import re
from pathlib import Path
import torch
from accelerate_cpp.devices.memory import return_free_memory

def resident_megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

small = [torch.ones(25_000) for _ in range(1000)]  # 100 MB, each below the size from which on memory is mapped
last = small[-1].clone()  # so that the end of the heap is in use
del small
before = resident_megabytes()
return_free_memory()
print(before - resident_megabytes())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert int(result.stdout) > 50
