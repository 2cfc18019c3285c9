"""A process that has imported torch and forks off the ranks of jobs: a rank starts in milliseconds instead of seconds.

The zygote reads requests from its standard input, one JSON object a line, and answers each with the new process's id.
It starts no thread, so forking it is safe. A rank leads a session of its own; when it has ended, its exit code
(negative for a signal) is in a file of the folder that the request named. When the standard input ends, so do the
zygote and its ranks.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Zygote:
    """The zygote as the process sees it that asks it for ranks."""

    def __init__(self, search_path: list[str], environment: Mapping[str, str]) -> None:
        """Both are the zygote's own, and ``search_path`` is the ``sys.path`` with which ranks begin."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(search_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def start(self, folder: Path, rank: int, program: str, environment: Mapping[str, str]) -> int:
        """Starts a rank, which calls ``program``, a function "module:name", and returns its process id.

        ``environment`` is all that the rank has.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"folder": str(folder), "rank": rank, "program": program, "environment": dict(environment)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        process = int(answer or 0)
        assert process > 1, f"the process that forks ranks answered {answer!r}"
        return process

    def end(self) -> None:
        """Ends the zygote and the ranks that are left."""
        self._process.communicate()


def exit_file(folder: Path, rank: int) -> Path:
    """Holds the exit code of a rank once it has ended."""
    return folder / f"exit{rank}"


def _import_what_ranks_use() -> None:
    import numpy
    import psutil
    import pytest  # by the file of the function that a rank runs
    import torch._dynamo.utils  # as the first optimizer would, which takes a second
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    import accelerate_cpp
    import faults
    import processes

    # A summary of compilations at exit, after which Python no longer knows that a Ctrl-C has ended the program.
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    # The package imports most of its parts when they are first used.
    assert all((torch.distributed, torch.nn.parallel, torch.utils.data, accelerate_cpp.Accelerator))
    assert all((numpy, psutil, pytest, faults, processes))
    # What is loaded stays. A collector that looked through it would make each rank copy it.
    gc.collect()
    gc.freeze()


def _become_rank(request: Mapping[str, Any]) -> Callable[[], None]:
    """Turns the forked child into a rank; returns what it is to do."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder, rank = request["folder"], request["rank"]
    for descriptor, path in enumerate(("/dev/null", f"{folder}/stdout{rank}", f"{folder}/stderr{rank}")):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # is that of the zygote's environment
    module, name = request["program"].split(":")
    program: Callable[[], None] = getattr(__import__(module), name)
    return program


class _Server:
    def __init__(self) -> None:
        self._ranks: dict[int, Path] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._unread = b""

    def serve(self) -> Callable[[], None] | None:
        """Returns ``None`` when no more requests come, and in a forked child what that has to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                    continue
                more = os.read(0, 65536)
                if not more:
                    self._end()
                    return None
                *lines, self._unread = (self._unread + more).split(b"\n")
                for line in lines:
                    if program := self._fork(json.loads(line)):
                        return program

    def _fork(self, request: Mapping[str, Any]) -> Callable[[], None] | None:
        process = os.fork()
        if process == 0:
            self._selector.close()
            return _become_rank(request)
        self._ranks[process] = exit_file(Path(request["folder"]), request["rank"])
        os.write(1, f"{process}\n".encode())
        return None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                path = self._ranks.pop(process)
                with suppress(FileNotFoundError):  # the test is over, and its folder gone
                    path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                    path.with_suffix(".part").rename(path)

    def _end(self) -> None:
        for process in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    _import_what_ranks_use()
    if run := _Server().serve():
        run()
