"""Runs a function in several real processes at once and reports how each ended.

The function must be at the top level of its file and its arguments and result picklable. Each process imports that file
by its path, with the caller's ``sys.path``; its environment describes rank, world size and where rank 0 listens, as
torchrun would.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_cpp.launch.plan.host_resources import free_port
from rank_process import Call, Process, await_end, end, may_be_forked, start_forked, start_fresh


@dataclass(frozen=True)
class Outcome:
    """How one process ended. ``exit_code`` is negative for a signal; ``value`` is the function's result or ``None``."""

    rank: int
    exit_code: int
    stdout: str
    stderr: str
    value: Any


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


class Running:
    """The processes that run a function, in rank order; their output goes to files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    def stdout(self, rank: int) -> str:
        return (self.folder / f"stdout{rank}").read_text(errors="replace")

    def outcome(self, rank: int) -> Outcome:
        """How a process ended that has."""
        exit_code, result = self.processes[rank].poll(), self.folder / f"result{rank}"
        assert exit_code is not None
        return Outcome(
            rank=rank,
            exit_code=exit_code,
            stdout=self.stdout(rank),
            stderr=(self.folder / f"stderr{rank}").read_text(errors="replace"),
            value=pickle.loads(result.read_bytes()) if result.exists() else None,
        )


@contextmanager
def running(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    finalize: bool = False,
) -> Iterator[Running]:
    """Runs ``function(*arguments)`` in ``world_size`` processes, and kills them and all that is left in their groups.

    Args:
        fresh: each process is an interpreter that has loaded nothing yet, for tests of how a program starts or ends,
            or of what it loads. Otherwise it may have torch and this package loaded, though not used.
        finalize: each process ends by taking the interpreter down, also when it may have torch loaded. Otherwise it
            may end when its threads and handlers have.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        job = Running(Path(name))
        (job.folder / "arguments").write_bytes(pickle.dumps(sys.path) + pickle.dumps(arguments))
        script_arguments = (inspect.getfile(function), function.__name__, f"{name}/arguments")
        try:
            for rank in range(world_size):
                environment_here = environment_of(rank, world_size, port, environment or {})
                for stream in ("stdout", "stderr"):
                    (job.folder / f"{stream}{rank}").touch()  # to be read from now on
                call = Call(job.folder, rank, (*script_arguments, f"{name}/result{rank}"), environment_here, finalize)
                forked = not fresh and may_be_forked(environment_here)
                job.processes.append(start_forked(call) if forked else start_fresh(call))
            yield job
        finally:
            end(job.processes)


def start_processes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    finalize: bool = False,
) -> list[Outcome]:
    """As :func:`running`, but returns the outcomes in rank order once all processes have ended.

    Each process leads a process group of its own; all of these groups are killed when ``timeout`` seconds are over (the
    exit code then is ``-SIGKILL``) and at the end, so that nothing outlives the call.
    """
    with running(function, world_size, *arguments, environment=environment, fresh=fresh, finalize=finalize) as job:
        deadline = time.monotonic() + timeout
        for process in job.processes:
            await_end(process, deadline)
        end(job.processes)
        return [job.outcome(rank) for rank in range(world_size)]


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    finalize: bool = False,
) -> list[Any]:
    """As :func:`start_processes`, but returns the results and fails with all output if any process failed."""
    outcomes = start_processes(
        function, world_size, *arguments, timeout=timeout, environment=environment, fresh=fresh, finalize=finalize
    )
    if any(outcome.exit_code != 0 for outcome in outcomes):
        report = "".join(
            f"\n--- rank {outcome.rank}: exit code {outcome.exit_code}\n{outcome.stdout}{outcome.stderr}"
            for outcome in outcomes
        )
        raise AssertionError(f"{function.__name__} failed in {world_size} processes:{report}")
    return [outcome.value for outcome in outcomes]


def files_in_shared_memory() -> set[str]:
    """The names in /dev/shm, but for semaphores of multiprocessing: those of tests beside this one look like any."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
