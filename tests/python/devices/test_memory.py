"""The memory that the machine or the container has left."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from accelerate_cpp.devices.host_memory import available_bytes


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
from accelerate_cpp.devices.host_memory import return_free_memory

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


FAULTS_OF_A_STEP = """
import gc, resource, sys, torch
from accelerate_cpp import Accelerator

def step():
    blocks = [torch.ones(1 << 20) for _ in range(32)]  # 4 MiB each

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
step()
print(faults())
if sys.argv[1] == "free":
    accelerator.free_memory()
    print(faults())
elif sys.argv[1] == "prepare":
    accelerator.prepare(torch.nn.Linear(2, 2))
    print(faults())
"""


def mebibytes_mapped(then: str, **environment: str) -> list[int]:
    """Of a step of 128 MiB after another, and of one after memory was freed."""
    command = [sys.executable, "-c", FAULTS_OF_A_STEP, then]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such choice")
def test_steps_on_a_cpu_use_the_memory_of_those_before() -> None:
    kept, returned = mebibytes_mapped("free")
    assert kept < 32
    assert returned > 96


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such choice")
def test_what_is_freed_while_a_further_model_is_prepared_is_returned() -> None:
    kept, returned = mebibytes_mapped("prepare")
    assert kept < 32
    assert returned > 96


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such choice")
def test_the_users_thresholds_for_keeping_memory_stay() -> None:
    (mapped,) = mebibytes_mapped("stay", MALLOC_TRIM_THRESHOLD_="131072")
    assert mapped > 96
