"""The command as a program, and programs on a terminal of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
PATIENCE_SECONDS = 120


@pytest.fixture
def run() -> Run:
    """Runs ``accelerate-cpp`` with the arguments."""

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    return start


class Terminal:
    """A Python program that has a terminal for itself, and the other side of that terminal."""

    def __init__(self, *arguments: str | Path, columns: int = 100, **environ: str) -> None:
        self._master, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.modes_before = self.modes()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environ},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )

    def expect(self, text: str) -> str:
        """What is printed up to and with ``text``."""
        while text not in self.seen:
            assert self._read(), f"no {text!r} in {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ended(self) -> int:
        """The exit status, once the program has ended; all that it printed is in ``seen``."""
        while self.process.poll() is None:
            self._read(patience=0.1)
        while self._read(patience=0.0):
            pass
        return self.process.returncode

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._terminal)

    def _read(self, patience: float = PATIENCE_SECONDS) -> bool:
        if not select.select([self._master], [], [], patience)[0]:
            return False
        self.seen += os.read(self._master, 4096).decode()
        return True

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)
        os.close(self._terminal)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts Python with the arguments on a terminal of its own; keywords are variables."""
    started: list[Terminal] = []

    def start(*arguments: str | Path, columns: int = 100, **environ: str) -> Terminal:
        started.append(Terminal(*arguments, columns=columns, **environ))
        return started[-1]

    yield start
    for program in started:
        program.close()
