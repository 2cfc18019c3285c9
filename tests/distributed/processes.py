"""Runs a function in several real processes at once and reports how each ended.

The function must be at the top level of its file and its arguments and result picklable. Each process imports that file
by its path, with the caller's ``sys.path``; its environment describes rank, world size and where rank 0 listens, as
torchrun would.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORKER = """
import importlib.util, pickle, sys
path, name, arguments, result = sys.argv[1:]
with open(arguments, "rb") as file:
    sys.path[:] = pickle.load(file)
    remaining = file.read()
spec = importlib.util.spec_from_file_location("worker_module", path)
module = importlib.util.module_from_spec(spec)
sys.modules["worker_module"] = module
spec.loader.exec_module(module)
value = getattr(module, name)(*pickle.loads(remaining))
with open(result, "wb") as file:
    pickle.dump(value, file)
"""


@dataclass(frozen=True)
class Outcome:
    """How one process ended. ``exit_code`` is negative for a signal; ``value`` is the function's result or ``None``."""

    rank: int
    exit_code: int
    stdout: str
    stderr: str
    value: Any


def free_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment_of(rank: int, world_size: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What a process needs to know of its place among ``world_size``, and ``extra``."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def start_processes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Runs ``function(*arguments)`` in ``world_size`` processes and returns their outcomes in rank order.

    Each process leads a process group of its own; all of these groups are killed when ``timeout`` seconds are over (the
    exit code then is ``-SIGKILL``) and at the end, so that nothing outlives the call.
    """
    port = free_port()
    path = inspect.getfile(function)
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(sys.path) + pickle.dumps(arguments))
        try:
            for rank in range(world_size):
                command = [sys.executable, "-c", _WORKER, path, function.__name__]
                command += [str(folder / "arguments"), str(folder / f"result{rank}")]
                with (folder / f"stdout{rank}").open("wb") as out, (folder / f"stderr{rank}").open("wb") as err:
                    workers.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            env=environment_of(rank, world_size, port, environment or {}),
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + timeout
            for worker in workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, deadline - time.monotonic()))
        finally:
            _end(workers)
        return [_outcome(folder, rank, worker.returncode) for rank, worker in enumerate(workers)]


def _outcome(folder: Path, rank: int, exit_code: int) -> Outcome:
    result = folder / f"result{rank}"
    return Outcome(
        rank=rank,
        exit_code=exit_code,
        stdout=(folder / f"stdout{rank}").read_text(errors="replace"),
        stderr=(folder / f"stderr{rank}").read_text(errors="replace"),
        value=pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """As :func:`start_processes`, but returns the results and fails with all output if any process failed."""
    outcomes = start_processes(function, world_size, *arguments, timeout=timeout, environment=environment)
    if any(outcome.exit_code != 0 for outcome in outcomes):
        report = "".join(
            f"\n--- rank {outcome.rank}: exit code {outcome.exit_code}\n{outcome.stdout}{outcome.stderr}"
            for outcome in outcomes
        )
        raise AssertionError(f"{function.__name__} failed in {world_size} processes:{report}")
    return [outcome.value for outcome in outcomes]
