"""Why a rank is slower than the others, from what real processes do and from figures of known meaning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from accelerate_cpp.launch.view.causes import Causes, Usage, cause, usage_of
from accelerate_cpp.runtime.progress_board import Standing


def window(computed: float = 0.1, queued: float = 0.0, pages: float = 0.0, states: str = "RRRRR") -> list[Usage]:
    """Five looks at a rank that takes 10 steps between two of them, with these amounts in each step."""
    return [
        Usage(float(look), look * 10, look * 10 * computed, look * 10 * queued, int(look * 10 * pages), state)
        for look, state in enumerate(states)
    ]


OTHERS = [window(), window(), window()]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (window(computed=0.2), "it computes longer"),
        (window(queued=0.08), "it waits for a core, which others use"),
        (window(states="DDDDD"), "it waits for a disk"),
        (window(states="DDDDD", pages=12.0), "it waits for pages that are read from a disk or from swap (12 a step)"),
        (window(states="RRRRT"), "it is stopped"),
        (window(computed=0.11), "it neither computes nor reads a disk"),
        ([], ""),
        (window()[:1], ""),
    ],
)
def test_what_a_rank_has_more_of_is_the_cause(own: list[Usage], expected: str) -> None:
    found = cause(own, OTHERS, 0.1)
    assert found.startswith(expected)
    assert found or not expected


def test_what_all_ranks_have_is_no_cause() -> None:
    busy = [window(queued=0.5), window(queued=0.5)]
    assert cause(window(queued=0.5), busy, 0.1).startswith("it neither computes")


def _child(program: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_what_linux_says_of_a_process_that_computes_sleeps_and_is_stopped() -> None:
    computing = _child("print(flush=True)\nwhile True: pass")
    sleeping = _child("import time\nprint(flush=True)\ntime.sleep(1e6)")
    try:
        first = {child.pid: usage_of(child.pid, 0, 0.0) for child in (computing, sleeping)}
        while True:  # until one has computed for a while
            later = {child.pid: usage_of(child.pid, 1, 1.0) for child in (computing, sleeping)}
            used = {pid: later[pid].computed - first[pid].computed for pid in first}
            if used[computing.pid] > 0.2:
                break
        assert used[sleeping.pid] < 0.1
        assert later[sleeping.pid].state == "S"
        os.kill(sleeping.pid, signal.SIGSTOP)
        while (stopped := usage_of(sleeping.pid, 1, 1.0)).state != "T":
            time.sleep(0.01)
        assert cause([stopped], OTHERS, 1.0) == "it is stopped (SIGSTOP, or a debugger)"
    finally:
        for child in (computing, sleeping):
            child.kill()
            child.communicate()
    assert usage_of(computing.pid, 0, 0.0) is None


def test_slow_ranks_get_their_cause_and_others_none() -> None:
    def standing(rank: int, own: float, steps: int) -> Standing:
        waits = [0.5 - own] * 5
        return Standing(rank, steps=steps, step_seconds=[0.5] * 5, waited_seconds=waits, has_waited=True, pid=rank + 1)

    def usage(pid: int, steps: int, at: float) -> Usage:
        return Usage(at, steps, steps * (0.4 if pid == 2 else 0.1), 0.0, 0, "R")

    causes, found = Causes(usage), []
    for look in range(1, 4):
        found = causes.explained([standing(0, 0.1, look * 5), standing(1, 0.4, look * 5)], float(look))
    assert [standing.cause for standing in found] == ["", "it computes longer"]
