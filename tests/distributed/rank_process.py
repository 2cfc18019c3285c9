"""The process of one rank: an interpreter of its own or, in a fraction of the time, the fork of a zygote.

Both run the same script with the same arguments, environment, working directory and streams, and end as interpreters
do, except that a fork whose script has returned does not take its modules apart unless it is asked to: that takes it
longer than most tests. What a fork cannot give is left to interpreters: see :func:`may_be_forked`.
"""

from __future__ import annotations

import atexit
import builtins
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from zygote import Zygote, exit_file

_SCRIPT = """
import importlib.util, pickle, sys
path, name, arguments, result = sys.argv[1:]
with open(arguments, "rb") as file:
    sys.path[:] = pickle.load(file)
    remaining = file.read()
spec = importlib.util.spec_from_file_location("worker_module", path)
module = importlib.util.module_from_spec(spec)
sys.modules["worker_module"] = module
spec.loader.exec_module(module)
value = pickle.dumps(getattr(module, name)(*pickle.loads(remaining)))
with open(result, "wb") as file:
    file.write(value)
"""

# How the names of those variables begin that count when an interpreter starts or loads a library, and not afterwards.
_READ_AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "TZ", "HOME", "XDG_", "GLIBC_", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "NUMPY_", "NPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "KINETO_", "GLOO_", "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_"),
)
# Torch sets this one itself, also in the process of the tests, and reads it each time.
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
# A process has one seed for the hashes of strings, and its forks have it too. Because ranks in sequence come from
# different zygotes, they still differ in the order of their sets.
_ZYGOTES = 2
_START = "ACCELERATE_CPP_TEST_START"
# For `make test-full`: all ranks take the interpreter down, which finds what may go wrong then once in many runs.
ALL_FINALIZE = os.environ.get("ACCELERATE_CPP_TEST_FINALIZE") == "1"
_PATIENCE_SECONDS = 60.0  # until it is known that a killed process has ended


@dataclass(frozen=True)
class Call:
    """What the process of a rank is to do; ``folder`` is where its output goes.

    ``finalize``: a fork ends as interpreters do, by taking everything down.
    """

    folder: Path
    rank: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    finalize: bool = False


class Process(Protocol):
    """A process that leads a session and a group of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    named = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    named.pop(_SET_BY_TORCH, None)
    return named


_OF_ZYGOTES = {**os.environ, "OMP_NUM_THREADS": "1"}


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a fork of a zygote is what an interpreter with this environment would be."""
    return sys.platform == "linux" and _read_at_start(environment) == _read_at_start(_OF_ZYGOTES)


def start_fresh(call: Call) -> Process:
    """The process is an interpreter of its own."""
    with (
        (call.folder / f"stdout{call.rank}").open("wb") as out,
        (call.folder / f"stderr{call.rank}").open("wb") as err,
    ):
        return subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *call.arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(call.environment),
            start_new_session=True,
        )


@dataclass(frozen=True)
class _Forked:
    pid: int
    exit_file: Path

    def poll(self) -> int | None:
        return int(self.exit_file.read_text()) if self.exit_file.exists() else None


_zygotes: list[Zygote] = []
_lock = threading.Lock()


def start_forked(call: Call) -> Process:
    """The process is the fork of a zygote."""
    start = call.folder / f"start{call.rank}"
    start.write_bytes(pickle.dumps((call.arguments, os.getcwd(), call.finalize or ALL_FINALIZE)))
    environment = {**call.environment, _START: str(start)}
    pid = fork(call.folder, call.rank, f"{__name__}:run_forked", environment)
    return _Forked(pid, exit_file(call.folder, call.rank))


def fork(folder: Path, rank: int, program: str, environment: Mapping[str, str]) -> int:
    """As :meth:`Zygote.start`; all zygotes are started if there are none yet."""
    with _lock:
        try:
            while len(_zygotes) < _ZYGOTES:
                _zygotes.append(Zygote(sys.path, _OF_ZYGOTES))
            return _zygotes[rank % _ZYGOTES].start(folder, rank, program, environment)
        except BaseException:
            end_zygotes()  # the next call has new ones
            raise


def end_zygotes() -> None:
    """Ends the zygotes and their forks, if there are any; they end by themselves when this process does."""
    while _zygotes:
        _zygotes.pop().end()


def await_end(process: Process, deadline: float) -> int | None:
    """The exit code, once the process has ended, or ``None`` when it is too late by the monotonic clock."""
    while (exit_code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return exit_code


def end(processes: Sequence[Process]) -> None:
    """Kills what there is of the processes and their groups; returns when the processes have ended."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        for process in processes:
            # A fork may lead no group yet; the next time it does.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        soon = time.monotonic() + 0.1
        if None not in [await_end(process, soon) for process in processes]:
            return
        assert time.monotonic() < deadline, "killed processes have not ended"


def run_forked() -> None:
    """What the fork of a zygote does: it becomes what an interpreter is when it begins with the script, and runs it."""
    start = os.environ.pop(_START)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing is closed already
            if descriptor > 2:
                os.close(descriptor)
    arguments, folder, finalize = pickle.loads(Path(start).read_bytes())
    os.chdir(folder)
    sys.argv[:] = ["-c", *arguments]
    _seed_generators()
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(_SCRIPT, "<string>", "exec"), vars(main))
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    checkpoints = sys.modules.get("accelerate_cpp.checkpoint.background")
    if not finalize and (checkpoints is None or not checkpoints._unraised):
        _end()


def _end() -> NoReturn:
    """Does what an interpreter does at the end of its script, up to where it takes its modules apart."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _seed_generators() -> None:
    """Libraries seed their generators by chance when they are loaded. Python's own is seeded anew by every fork."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
