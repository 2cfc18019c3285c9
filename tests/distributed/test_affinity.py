"""Pinned workers in two real processes, however they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two processes are pinned apart on Linux with two cores or more",
)

SEES = """
import json, os
def see():
    names = ("ACCELERATE_CPU_AFFINITY", "OMP_NUM_THREADS")
    return [sorted(os.sched_getaffinity(0)), *[os.environ.get(name) for name in names]]
"""
TRAINS = """
import torch
from accelerate_cpp import Accelerator
before = see()
Accelerator(cpu=True)
print(json.dumps([before, see(), torch.get_num_threads()]))
"""


def _run(folder: Path, command: list[str], script: str, **environ: str) -> list[Any]:
    """What the two workers print, one line of JSON each; nothing may be said on standard error."""
    (folder / "train.py").write_text(SEES + script)
    inherited = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


def _launch(*flags: str) -> list[str]:
    return [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2", *flags]


def _apart(shares: list[list[int]]) -> bool:
    """Whether the shares are disjoint and together all cores that this process may use."""
    return len(shares) == 2 and sorted(chain(*shares)) == sorted(os.sched_getaffinity(0))


def test_launched_workers_have_cores_of_their_own_from_their_start_and_keep_them(tmp_path: Path) -> None:
    workers = _run(tmp_path, _launch("--enable_cpu_affinity"), TRAINS)
    assert _apart([before[0] for before, _, _ in workers])
    fewest = min(len(before[0]) for before, _, _ in workers)
    for before, after, threads in workers:
        assert after == before
        assert before[1] == "1"
        assert int(before[2]) == threads <= fewest


def test_a_variable_pins_launched_workers_too(tmp_path: Path) -> None:
    workers = _run(tmp_path, _launch(), "print(json.dumps(see()))", ACCELERATE_CPU_AFFINITY="1", OMP_NUM_THREADS="3")
    assert _apart([cores for cores, _, _ in workers])
    assert [threads for _, _, threads in workers] == ["3", "3"]


def test_without_either_workers_may_run_on_all_cores(tmp_path: Path) -> None:
    workers = _run(tmp_path, _launch(), "print(json.dumps(see()))")
    assert [worker[:2] for worker in workers] == [[sorted(os.sched_getaffinity(0)), None]] * 2


def test_workers_of_a_notebook_are_pinned_and_the_notebook_is_not(tmp_path: Path) -> None:
    script = """
from accelerate_cpp import notebook_launcher
notebook_launcher(lambda: print(json.dumps(see())), num_processes=2)
print(json.dumps(see()))
"""
    first, second, own = _run(tmp_path, [sys.executable], script, ACCELERATE_CPU_AFFINITY="1", ACCELERATE_USE_CPU="1")
    assert _apart([first[0], second[0]])
    assert own[0] == sorted(os.sched_getaffinity(0))


def pinned_by_the_state() -> tuple[list[int], list[int]]:
    from accelerate_cpp import PartialState
    from accelerate_cpp.utils import set_numa_affinity

    state = PartialState(cpu=True)
    by_state = sorted(os.sched_getaffinity(0))
    set_numa_affinity(state.local_process_index)
    return by_state, sorted(os.sched_getaffinity(0))


def test_processes_that_torchrun_started_pin_themselves_and_find_the_same_shares_again() -> None:
    environment = {"ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_CPP_CORES": ""}
    results = run_processes(pinned_by_the_state, 2, environment=environment)
    assert _apart([by_state for by_state, _ in results])
    assert all(by_state == by_hand for by_state, by_hand in results)
