"""Running commands in tests: launches, and programs whose output is shown while they run."""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import accelerate_cpp
from accelerate_cpp.config import env_table
from accelerate_cpp.launch.plan.machines import DEFAULT_PORT
from accelerate_cpp.test_utils.backend import device_count

__all__ = [
    "DEFAULT_LAUNCH_COMMAND",
    "RunOutput",
    "SubprocessCallException",
    "execute_subprocess_async",
    "get_launch_command",
    "get_torch_dist_unique_port",
    "path_in_accelerate_package",
    "pytest_xdist_worker_id",
    "run_command",
]

_CHUNK = 1 << 16


def get_launch_command(**kwargs: Any) -> list[str]:
    """The command that launches what is put behind it, with these flags: ``get_launch_command(num_processes=2)``.

    A flag that is ``True`` stands alone; those that are ``False`` or ``None`` are left out.
    """
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in kwargs.items()
        if value is not None and value is not False
    ]
    return ["accelerate-cpp", "launch", *flags]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)
"""Launches as many processes as there are devices."""


def path_in_accelerate_package(*components: str) -> Path:
    """The path of a file or folder of this package: ``path_in_accelerate_package("test_utils", "scripts")``."""
    return Path(accelerate_cpp.__file__).parent.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """The number of this process among those of pytest-xdist; 0 without it."""
    return int((env_table.XDIST_WORKER.get() or "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """A port for rank 0 that tests in other processes of pytest-xdist do not use: 29500 and on."""
    return DEFAULT_PORT + pytest_xdist_worker_id()


class SubprocessCallException(Exception):
    """A command of :func:`run_command` failed; the message has its output."""


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Runs ``command`` to its end.

    Args:
        return_stdout: return what it wrote to standard output; else nothing is returned.
        env: its whole environment; ``None`` for that of this process.

    Raises:
        SubprocessCallException: its exit status is not 0.
    """
    done = subprocess.run(
        list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise SubprocessCallException(
            f"`{shlex.join(map(str, command))}` failed with exit status {done.returncode}; its output:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


@dataclass
class RunOutput:
    """How a command ended.

    Attributes:
        returncode: its exit status.
        stdout: the lines of its standard output.
        stderr: those of its standard error.
    """

    returncode: int
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Runs ``cmd`` to its end, and shows each line of its output as it comes.

    Args:
        env: its whole environment; ``None`` for that of this process.
        stdin: its standard input, as for ``subprocess.Popen``.
        timeout: seconds after which it is killed.
        quiet: do not show its output.
        echo: show the command first.

    Raises:
        RuntimeError: its exit status is not 0, or it was killed; the message has its standard error.
    """
    shown = shlex.join(map(str, cmd))
    if echo:
        print("\nRunning: ", shown)
    process = subprocess.Popen(
        list(map(str, cmd)), env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + timeout
    result = RunOutput(0)
    ended = False
    try:
        ended = _read(process, result, deadline, quiet)
        ended = ended and _has_ended(process, deadline)
    finally:
        if not ended:
            process.kill()
        result.returncode = process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if ended and result.returncode == 0:
        return result
    how = f"failed with returncode {result.returncode}" if ended else f"was killed after {timeout} seconds"
    raise RuntimeError(f"'{shown}' {how}\n\nIts standard error:\n" + "\n".join(result.stderr))


def _read(process: subprocess.Popen[bytes], result: RunOutput, deadline: float, quiet: bool) -> bool:
    """Reads the output of ``process`` into ``result``; returns whether it ended before ``deadline``."""
    streams = [
        ("stdout", process.stdout, result.stdout, sys.stdout),
        ("stderr", process.stderr, result.stderr, sys.stderr),
    ]
    begun = {name: b"" for name, *_ in streams}

    def take(name: str, chunk: bytes, lines: list[str], screen: IO[str]) -> None:
        """An empty chunk ends a stream: a line that was begun is the last."""
        *whole, begun[name] = (begun[name] + chunk).split(b"\n")
        if not chunk and begun[name]:
            whole.append(begun.pop(name))
        for line in whole:
            lines.append(line.decode(errors="replace").rstrip("\r"))
            if not quiet:
                print(f"{name}:", lines[-1], file=screen)

    with selectors.DefaultSelector() as selector:
        for name, pipe, lines, screen in streams:
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, (name, lines, screen))
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK)
                name, lines, screen = key.data
                take(name, chunk, lines, screen)
                if not chunk:
                    selector.unregister(key.fileobj)
    return True


def _has_ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True
