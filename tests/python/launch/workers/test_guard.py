from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from accelerate_cpp.launch.workers.guard import Guard
from accelerate_cpp.launch.workers.worker import living_members

PATIENCE_SECONDS = 120.0
# A launcher that has a group watched, says so, and waits.
LAUNCHER = """
import os, subprocess, sys
from accelerate_cpp.launch.workers.guard import Guard
guard = Guard()
group = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True, stdout=subprocess.DEVNULL)
guard.watch(group.pid)
print(group.pid, guard._process.pid, flush=True)
sys.stdin.read()
"""


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _launcher() -> tuple[subprocess.Popen[str], int, int]:
    """A launcher, the group that it has watched, and its guard."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    group, guard = map(int, process.stdout.readline().split())
    _eventually(lambda: len(living_members({group})) == 3)
    return process, group, guard


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_groups_are_ended_with_a_killed_launcher_and_then_the_guard_ends() -> None:
    process, group, guard = _launcher()
    _end(process)
    _eventually(lambda: not living_members({group, guard}))


def test_descriptor_that_a_fork_has_inherited_does_not_hold_the_guard_up() -> None:
    process, group, _ = _launcher()
    holder = os.open(f"/proc/{process.pid}/fd/{_pipe_to_guard(process.pid)}", os.O_WRONLY)
    _end(process)
    _eventually(lambda: not living_members({group}))
    os.close(holder)


def _pipe_to_guard(launcher: int) -> int:
    """The descriptor of the only pipe beside the three standard streams."""
    folder = f"/proc/{launcher}/fd"
    (found,) = [
        int(name) for name in os.listdir(folder) if int(name) > 2 and os.readlink(f"{folder}/{name}").startswith("pipe")
    ]
    return found


def test_dismissed_guard_ends_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    group = subprocess.Popen(["sleep", "600"], start_new_session=True)
    guard = Guard()
    guard.watch(group.pid)
    guard.dismiss()
    assert living_members({group.pid}) == [group.pid]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    group.kill()
    group.wait()


def test_guard_that_somebody_ended_is_no_error() -> None:
    guard = Guard()
    guard._process.kill()
    guard._process.wait()
    guard.watch(os.getpgrp())
    guard.dismiss()


def test_group_that_has_ended_meanwhile_does_not_matter() -> None:
    process, group, guard = _launcher()
    subprocess.run(["kill", "-9", "--", f"-{group}"], check=True)
    _end(process)
    _eventually(lambda: not living_members({group, guard}))
