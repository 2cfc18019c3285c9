"""A process that ends the processes of workers when the launcher is killed.

The kernel ends workers with their launcher (:mod:`accelerate_cpp.launch.workers.child`), but not what they have started
in their process groups, such as the workers of data loaders. The guard outlives the launcher for long enough to do so.
It is this file, run by its path: a program that imports nothing of the package and so is small and there at once.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from contextlib import suppress

_GROUP = struct.Struct("=i")
_DISMISSED = 0
_CHUNK_BYTES = 4096 * _GROUP.size


class Guard:
    """The launcher's side: starts the guard of this process, which is in a session of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Makes the guard end the group if this process is killed; its id must stay in use until :meth:`dismiss`."""
        self._tell(group)

    def dismiss(self) -> None:
        """Ends the guard. Nothing else is ended."""
        self._tell(_DISMISSED)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was ended from outside; the launcher continues without it
            self._process.stdin.write(_GROUP.pack(number))


def _take_in(groups: list[int]) -> bool:
    """Adds to ``groups`` what the launcher has named since; returns whether it can name no more."""
    while True:
        try:
            chunk = os.read(0, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        groups += [group for (group,) in _GROUP.iter_unpack(chunk)]


def main(launcher: int) -> None:
    """Waits for the end of the process ``launcher``, the parent, and kills the groups that it has named until then."""
    groups: list[int] = []
    os.set_blocking(0, False)
    pidfd = -1
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(launcher)
    if os.getppid() != launcher:  # it has ended before this process got here, and its number may be another's
        pidfd = -1
    running = True
    while running:
        # Looked at first, so that all that was named before the end is taken in after it.
        running = pidfd >= 0 and not select.select([pidfd], [], [], 0)[0]
        closed = _take_in(groups)
        if _DISMISSED in groups:
            return
        if closed:
            break
        if running:
            select.select([0, pidfd], [], [])
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):  # all have ended, or have another user now
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
