"""Jobs of real processes to which something bad happens, and a check that nothing of them is left.

A :class:`Job` runs a function in several processes, lets the test act when one of them tells of an event, and at the
end looks for what the job has left behind: processes, shared memory, sockets, temporary files. Functions that run in
the processes find each other with :func:`connect`, :func:`tell` and :func:`await_event`.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from processes import Outcome
from rank_process import ALL_FINALIZE, fork
from zygote import exit_file

# Long enough for every machine; only a test that fails waits for so long.
PATIENCE = 120.0
# The rank that stands for the test in events.
TEST = -1
FOLDER = "ACCELERATE_CPP_TEST_JOB"
FINALIZE = "ACCELERATE_CPP_TEST_JOB_FINALIZES"
TORCH_CACHE = "torchinductor_"  # made when torch's compiler is imported, to be kept
TRACEBACK = signal.SIGUSR1
SOCKET_PREFIX = "@accelerate_cpp-"


class Raised(NamedTuple):
    """What a function raised; ``at`` is the reading of the clock that all processes of the machine share."""

    kind: str
    message: str
    at: float


def raised_by(function: Callable[[], Any]) -> Raised:
    """Class name and message of what ``function`` raises, and when."""
    try:
        function()
    except BaseException as error:
        return Raised(type(error).__name__, str(error), time.monotonic())
    return Raised("nothing", "was raised", time.monotonic())


def await_true(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    """Returns when ``condition`` holds; fails when it still does not after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience} s for {what}"
        time.sleep(0.005)


# --- in the processes of a job ----------------------------------------------------------------------------------------


def job_folder() -> Path:
    return Path(os.environ[FOLDER])


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _event(folder: Path, name: str, of: int) -> Path:
    return folder / "events" / f"{name}.{of}"


def tell(name: str, text: str = "") -> None:
    """Tells the other processes and the test that this rank has come to the event ``name``."""
    path = _event(job_folder(), name, rank())
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def await_event(name: str, of: int) -> str:
    """Returns the text with which rank ``of`` has told of the event; waits for it if need be."""
    path = _event(job_folder(), name, of)
    await_true(path.exists, f"{name} of rank {of}")
    return path.read_text()


def meet(name: str) -> None:
    """Returns when all ranks have come here. No collective, and it does not mind a failed group."""
    tell(name)
    for peer in range(world_size()):
        await_event(name, peer)


def connect(name: str = "job", seconds: float = PATIENCE, backend: str = "cpu:shm") -> Any:
    """torch.distributed, whose default group now has all ranks of the job; ``name`` is its own among the job's groups.

    No rank's end takes the store away. Returns when all ranks are there, so that a short timeout is not spent on that.
    """
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    store = dist.FileStore(str(job_folder() / "store"), world_size())
    meet(f"connecting-{name}")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank(),
        world_size=world_size(),
        timeout=timedelta(seconds=seconds),
    )
    meet(f"connected-{name}")
    return dist


def limit_waits(dist: Any, seconds: float) -> None:
    """From now on collectives of the default group give up after ``seconds``."""
    import torch

    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- in the test ------------------------------------------------------------------------------------------------------


class Job:
    """``function(*arguments)`` in ``size`` processes. Leaving the ``with`` block ends them all, however it is left."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        finalize: bool = False,
    ) -> None:
        """``finalize``: ranks end as scripts do, by taking the interpreter down; otherwise at once, which is quick."""
        self.size = size
        self._call = (inspect.getfile(function), function.__name__, arguments)
        self._extra = dict(environment or {})
        self._finalize = finalize or ALL_FINALIZE
        self._directory = tempfile.TemporaryDirectory(prefix="accelerate_cpp_job_")
        self.folder = Path(self._directory.name)
        self._processes: list[int] = []

    def __enter__(self) -> Job:
        for name in ("events", "temporary"):
            (self.folder / name).mkdir()
        (self.folder / "call").write_bytes(pickle.dumps((sys.path, *self._call)))
        for worker in range(self.size):
            place = {"RANK": worker, "LOCAL_RANK": worker, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **{name: str(value) for name, value in place.items()},
                "TMPDIR": str(self.folder / "temporary"),
                FOLDER: str(self.folder),
                FINALIZE: str(int(self._finalize)),
                **self._extra,
            }
            self._processes.append(fork(self.folder, worker, "faults:work", environment))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while remaining := self._remaining():
            for process in remaining:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        await_true(lambda: None not in self._exit_codes(), "the zygote to bury its children")
        self._directory.cleanup()

    def process(self, of: int) -> int:
        """The process id of a rank."""
        return self._processes[of]

    def signal(self, of: int, number: signal.Signals) -> float:
        """Sends a rank a signal; returns when, by the clock of :class:`Raised`."""
        now = time.monotonic()
        os.kill(self._processes[of], number)
        return now

    def await_event(self, name: str, of: int) -> str:
        """As the function of that name, but notices that the rank has ended."""
        path = _event(self.folder, name, of)
        with suppress(AssertionError):
            await_true(lambda: path.exists() or self._exit_code(of) is not None, f"{name} of rank {of}")
        assert path.exists(), f"waited in vain for {name} of rank {of}\n{self._report()}"
        return path.read_text()

    def tell(self, name: str) -> None:
        """The test's own event, for :func:`await_event` with ``of=TEST``."""
        _event(self.folder, name, TEST).touch()

    def finish(self, *, failing: Mapping[int, int] | None = None) -> list[Outcome]:
        """Waits for all ranks to end, looks for what they have left, and returns how they ended, in rank order.

        Args:
            failing: the exit codes of those ranks that are to end with another one than 0.
        """
        expected = [(failing or {}).get(worker, 0) for worker in range(self.size)]

        def over() -> bool:
            codes = self._exit_codes()
            unexpected = [code for code, wanted in zip(codes, expected, strict=True) if code not in (None, wanted)]
            return None not in codes or bool(unexpected)

        with suppress(AssertionError):
            await_true(over, "the ranks to end")
        assert self._exit_codes() == expected, self._report()
        left: list[str] = []

        def clean() -> bool:
            left[:] = self._leftovers()
            return not left

        # Orphans end on their own, but not at the same moment as their parent.
        with suppress(AssertionError):
            await_true(clean, "the job's remains to go")
        assert not left, left
        return [self._outcome(worker) for worker in range(self.size)]

    def _exit_code(self, worker: int) -> int | None:
        path = exit_file(self.folder, worker)
        return int(path.read_text()) if path.exists() else None

    def _exit_codes(self) -> list[int | None]:
        return [self._exit_code(worker) for worker in range(self.size)]

    def _outcome(self, worker: int) -> Outcome:
        code, result = self._exit_code(worker), self.folder / f"result{worker}"
        return Outcome(
            rank=worker,
            exit_code=0 if code is None else code,
            stdout=(self.folder / f"stdout{worker}").read_text(errors="replace"),
            stderr=(self.folder / f"stderr{worker}").read_text(errors="replace"),
            value=pickle.loads(result.read_bytes()) if result.exists() else None,
        )

    def _report(self) -> str:
        """How the ranks have ended, or where they are."""
        for process in self._remaining():
            if process in self._processes:
                os.kill(process, TRACEBACK)
        with suppress(AssertionError):
            await_true(lambda: None not in self._exit_codes(), "ranks to end after all", 2)
        lines = []
        for worker, code in enumerate(self._exit_codes()):
            outcome = self._outcome(worker)
            ending = "still runs" if code is None else f"exit code {code}"
            lines += [f"--- rank {worker}: {ending}", outcome.stdout, outcome.stderr]
        return "\n".join(lines)

    def _remaining(self) -> list[int]:
        """The processes of the job: ranks lead sessions, which what they start belongs to."""
        return [process for process in _all_processes() if _session_of(process) in self._processes]

    def _leftovers(self) -> list[str]:
        """What there still is of the job on this machine, one sentence each."""
        processes = self._remaining()
        held = {inode for process in _all_processes() if process not in processes for inode in _sockets_of(process)}
        left = [f"process {process}: {_command_of(process)}" for process in processes]
        left += [f"socket {name}" for inode, name in _listening_sockets() if inode not in held]
        left += [f"shared memory {path}" for path in Path("/dev/shm").iterdir() if self._is_ours(path)]
        temporary = (self.folder / "temporary").iterdir()
        left += [f"temporary file {path}" for path in temporary if not path.name.startswith(TORCH_CACHE)]
        return left

    def _is_ours(self, path: Path) -> bool:
        """Whether a file in /dev/shm is ours, or torch's on behalf of one of our processes."""
        torch_names = tuple(f"torch_{process}_" for process in self._processes)
        return path.name.startswith(("accelerate_cpp", *torch_names))


def _all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _session_of(process: int) -> int:
    """The id of the process's session; 0 for one that has ended, if only just."""
    try:
        state, _, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0
    return 0 if state in "ZX" else int(session)


def _command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended meanwhile"


def _sockets_of(process: int) -> Iterator[str]:
    """The inode numbers of the sockets that a process has open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{process}/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _listening_sockets() -> Iterator[tuple[str, str]]:
    """Inode number and name of every abstract socket of this library."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith(SOCKET_PREFIX):
            yield fields[6], fields[7]


def run_job(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    failing: Mapping[int, int] | None = None,
    finalize: bool = False,
) -> list[Any]:
    """Runs a job in which the test itself need not act, and returns the results in rank order."""
    with Job(function, size, *arguments, environment=environment, finalize=finalize) as job:
        return [outcome.value for outcome in job.finish(failing=failing)]


def work() -> None:
    """What a rank of a job does."""
    faulthandler.register(TRACEBACK)
    sys.path[:], path, name, arguments = pickle.loads((job_folder() / "call").read_bytes())
    spec = importlib.util.spec_from_file_location("worker_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_module"] = module
    spec.loader.exec_module(module)
    value = getattr(module, name)(*arguments)
    (job_folder() / f"result{rank()}").write_bytes(pickle.dumps(value))
    if os.environ[FINALIZE] == "1":
        gc.unfreeze()  # so that all that is loaded is taken apart
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
