"""The end of standard input ends a launcher, and the program that it becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

WAITS = "print('waits', flush=True); import time; time.sleep(600)"
ITSELF = f"""
import os, signal
from accelerate_cpp.launch.workers.end_of_input import watched_stdin
with watched_stdin(lambda: os.kill(os.getpid(), signal.SIGTERM)):
    {WAITS}
"""
BECOMES = f"""
import os, sys
from accelerate_cpp.launch.workers.end_of_input import end_next_program_with_stdin
end_next_program_with_stdin()
os.execv(sys.executable, [sys.executable, "-c", '''assert not __import__("sys").stdin.read(); {WAITS}'''])
"""


@pytest.mark.parametrize("program", [ITSELF, BECOMES], ids=["itself", "becomes another"])
def test_the_end_of_input_is_noticed(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "waits\n"
        process.stdin.write("words end nothing\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.close()
        assert process.wait(60) == -signal.SIGTERM


def test_the_end_of_input_after_the_run_does_nothing() -> None:
    program = ITSELF.replace(WAITS, "pass") + "import sys\nprint('over', flush=True)\n"
    program += "import time; time.sleep(1)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "over\n"
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_who_watches_the_input_of_another_program_ends_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BECOMES.replace("600", "0")], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.read() == b"waits\n"  # it does not hold this pipe, either
        assert process.wait(60) == 0
        deadline = time.monotonic() + 60
        with pytest.raises(BrokenPipeError):
            while time.monotonic() < deadline:
                os.write(process.stdin.fileno(), b"x")  # until nobody reads it
                time.sleep(0.1)
