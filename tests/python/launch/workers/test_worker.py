from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.launch.workers.worker import exit_code_of_ended, is_stopped, living_members


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("import os; os._exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_exit_code_is_read_without_reaping(code: str, expected: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    assert exit_code_of_ended(process.pid) == expected
    assert process.wait() == expected


def test_a_process_that_is_traced_is_stopped_but_by_no_signal() -> None:
    traced = "ctypes.CDLL(None).ptrace(0, 0, None, None); "  # PTRACE_TRACEME: this process is the tracer
    for by_signal, trace in [(True, ""), (False, traced)]:
        code = f"import ctypes, os, signal; {trace}os.kill(os.getpid(), signal.SIGSTOP)"
        process = subprocess.Popen([sys.executable, "-c", code])
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        assert is_stopped(process.pid, by_signal=True) == by_signal
        process.kill()
        process.wait()


def test_members_are_the_living_processes_of_the_group() -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    member = int(leader.stdout.readline())
    try:
        assert set(living_members({leader.pid})) == {leader.pid, member}
        leader.kill()
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        assert living_members({leader.pid}) == [member]
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()


def test_name_with_spaces_and_parentheses_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "600"], start_new_session=True)
    try:
        assert living_members({process.pid}) == [process.pid]
    finally:
        process.kill()
        process.wait()


def test_processes_that_proc_hides_are_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid=1 those of other users are listed, and cannot be read."""
    read_text = Path.read_text

    def read_own(path: Path, **more: Any) -> str:
        if str(path) == "/proc/1/stat":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return read_text(path, **more)

    monkeypatch.setattr(Path, "read_text", read_own)
    assert os.getpid() in living_members({os.getpgid(0)})
    assert not is_stopped(1)
