"""The worker processes of a contestant: how they are started, spoken to and ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from accelerate_cpp.launch.plan.host_resources import free_port

SOCKET_VARIABLE = "BENCHMARK_SOCKET"
TURN_LIMIT_SECONDS = 600
END_LIMIT_SECONDS = 30


@dataclass(frozen=True)
class Contestant:
    """Who takes part."""

    name: str
    launcher: str = "processes"
    """``"processes"``, which get their ranks through torch's environment variables, or ``"mpirun"``."""

    @property
    def absent(self) -> str:
        """Why it cannot take part on this machine; empty when it can."""
        if self.launcher == "mpirun" and not (shutil.which("mpirun") and importlib.util.find_spec("mpi4py")):
            return "not installed (needs mpirun and mpi4py)"
        return ""


def own_rank() -> int:
    """The rank of the worker that calls."""
    return int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


class Group:
    """The workers of one contestant. All of them sleep, except during a turn."""

    def __init__(self, script: str, contestant: Contestant, world_size: int) -> None:
        self.name = contestant.name
        self._workers: dict[int, _Worker] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "turns")
            listener.bind(address)
            listener.listen(world_size)
            command = [sys.executable, script, "--worker", contestant.name]
            self._processes = _start(command, contestant.launcher, world_size, {SOCKET_VARIABLE: address})
            try:
                self._accept(listener, world_size)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket, world_size: int) -> None:
        while len(self._workers) < world_size:
            if select.select([listener], [], [], 0.2)[0]:
                worker = _Worker(listener.accept()[0])
                rank = worker.receive()
                if rank is None:
                    raise SystemExit(f"a worker of '{self.name}' ended before it was ready")
                self._workers[int(rank)] = worker
            elif any(process.poll() is not None for process in self._processes):
                raise SystemExit(f"a worker of '{self.name}' ended before it was ready; its error is above")

    def turn(self, measurement: str) -> dict[str, float]:
        """Lets all workers measure and returns rank 0's answer, once all have answered and sleep again."""
        ended = SystemExit(f"a worker of '{self.name}' ended in '{measurement}' without a word")
        answers: dict[int, dict[str, float]] = {}
        for worker in self._workers.values():
            if not worker.send(measurement):
                raise ended
        while waiting := {worker: rank for rank, worker in self._workers.items() if rank not in answers}:
            ready = select.select(list(waiting), [], [], TURN_LIMIT_SECONDS)[0]
            if not ready:
                raise SystemExit(
                    f"'{self.name}' did not finish a turn of '{measurement}' within {TURN_LIMIT_SECONDS} s: "
                    f"ranks {sorted(waiting.values())} have not answered"
                )
            for worker in ready:
                answer = worker.receive()
                if answer is None:
                    raise ended
                if "failed" in answer:
                    raise SystemExit(f"a worker of '{self.name}' failed in '{measurement}':\n{answer['failed']}")
                answers[waiting[worker]] = answer
        return answers[0]

    def end(self) -> None:
        """Lets the workers leave; raises ``SystemExit`` when one fails to."""
        self._close()
        for process in self._processes:
            try:
                status = process.wait(END_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                raise SystemExit(f"a worker of '{self.name}' did not end within {END_LIMIT_SECONDS} s") from None
            if status != 0:
                raise SystemExit(f"a worker of '{self.name}' ended with status {status}; its error is above")

    def kill(self) -> None:
        """Ends the workers that are left; mpirun, which is asked first, ends those that it started."""
        self._close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class _Worker:
    """The parent's end of a worker's socket: one line of JSON there, one back."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: IO[str] = connection.makefile(encoding="utf-8")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: str) -> bool:
        """Returns whether the worker was there."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def receive(self) -> Any:
        """Returns ``None`` when the worker has ended."""
        with contextlib.suppress(ConnectionResetError):
            line = self._lines.readline()
            return json.loads(line) if line else None
        return None

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def _start(
    command: list[str], launcher: str, world_size: int, variables: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Starts one worker per rank. What they print goes to stderr, since stdout belongs to the table."""
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": str(threads)}

    def start(arguments: list[str], **ranks: str) -> subprocess.Popen[bytes]:
        own = {**environment, **ranks}
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=own)

    if launcher == "mpirun":
        environment.pop("RANK", None)
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [start(["mpirun", *as_root, "--oversubscribe", "-np", str(world_size), *command])]
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
    }
    return [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(world_size)]
