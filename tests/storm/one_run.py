"""One run from its start to the verdict."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from tests.storm import loading
from tests.storm.draw import Fault
from tests.storm.injection import dropped_packets, inject, is_awaited, read
from tests.storm.judging import Seen, judge, row
from tests.storm.starting import marked, missing_for, start, surroundings

from network_namespaces import Unavailable, two_hosts

HANG_SECONDS = 240.0
"""A run that lasts for longer hangs."""
LINGER_SECONDS = 20.0
"""How long what the run has left may take to end."""
_PAUSE_SECONDS = 0.02
# What torch, MPI and Jupyter leave of killed processes, wherever they keep their temporary files.
_FOREIGN = ("torchelastic_", "torchinductor_", "ompi.", "jupyter", "pymp-", "prte.", "pmix")


class _Reader:
    """Takes the lines of a pipe, with the time of each, until it ends or :meth:`close`."""

    def __init__(self, stream: IO[bytes], lines: list[tuple[float, str]]) -> None:
        self._stream, self._lines = stream, lines
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads no more, so that whoever writes to the pipe learns that nobody reads it."""
        self._is_closed.set()
        self._thread.join()

    def await_end(self) -> None:
        """Returns when the pipe has ended: all that could write to it must have."""
        self._thread.join()

    def _read(self) -> None:
        unfinished = b""
        with self._stream:
            while not self._is_closed.is_set():
                if not select.select([self._stream], [], [], 0.1)[0]:
                    continue
                chunk = os.read(self._stream.fileno(), 1 << 16)
                *complete, unfinished = (unfinished + chunk).split(b"\n")
                if not chunk and unfinished:
                    complete, unfinished = [unfinished], b""
                for line in complete:
                    self._lines.append((time.monotonic(), line.decode(errors="replace")[:2000]))
                if not chunk:
                    return


def run(fault: Fault) -> dict[str, Any]:
    """Starts a run, hits it, and returns the line of its verdict; nothing of it is left afterwards."""
    if lacks := missing_for(fault):
        return {"fault": fault.__dict__, "skipped": lacks}
    mark = f"storm-{os.getpid()}-{fault.seed}-{fault.index}"
    folder = Path(tempfile.mkdtemp(prefix=f"{mark}-"))
    try:
        with ExitStack() as stack:
            hosts = stack.enter_context(two_hosts()) if fault.start == "hosts" else None
            place = stack.enter_context(surroundings(fault, folder, mark, hosts))
            seen = _watched(fault, place)
            if seen.injected_at is not None:
                spoiled = seen.how if "checkpoint" in fault.kind else ""
                seen.checkpoint = _problem_of_checkpoint(fault, place.project, spoiled, _saved(seen))
        return row(fault, seen, judge(fault, seen))
    except Unavailable as reason:
        return {"fault": fault.__dict__, "skipped": str(reason)}
    except Exception as error:  # one fault that cannot be made is no reason to end a storm
        traceback.print_exc()
        failed = {"ok": False, "failures": [f"not made: {type(error).__name__}: {error}"], "named": None}
        return {"fault": fault.__dict__, **failed}
    finally:
        end_all(mark)
        shutil.rmtree(folder, ignore_errors=True)


def _saved(seen: Seen) -> int:
    """The newest step that a rank has told to be over, which it does after the save."""
    told = re.findall(r"\bstep (\d+) of rank", "\n".join(line for _, line in seen.lines))
    return max(map(int, told), default=-1)


def _problem_of_checkpoint(fault: Fault, project: Path, spoiled: str, saved: int) -> str:
    try:
        return loading.problem(fault, project, spoiled, saved)
    except AssertionError as error:
        return str(error)[-3000:]


def _watched(fault: Fault, place: Any) -> Seen:
    seen = Seen()
    started = start(fault, place)
    outputs = [_Reader(process.stdout, seen.lines) for process in started if process.stdout]
    errors = [_Reader(process.stderr, seen.lines) for process in started if process.stderr]
    deadline = time.monotonic() + HANG_SECONDS
    awaited = is_awaited(fault)
    while time.monotonic() < deadline and any(process.poll() is None for process in started):
        if awaited and (announced := read(place.folder / "announced")) is not None:
            awaited = False
            seen.missed = inject(fault, place, started, outputs, announced)
        time.sleep(_PAUSE_SECONDS)
    if all(process.poll() is not None for process in started):
        seen.ended_at = time.monotonic()
        seen.statuses = [process.wait() for process in started]
    else:
        seen.where = _stacks(place.mark)
    told = read(place.folder / "injected")
    if told is not None:
        seen.injected_at, seen.how = told["at"], told["how"]
        seen.dropped = dropped_packets(fault, place) if fault.kind in ("lost packets", "cut network") else 0
    if seen.ended_at is not None:
        seen.left = _left(fault, place)
    end_all(place.mark)
    for process in started:
        process.wait()
    for reader in (*outputs, *errors):
        reader.await_end()
    seen.lines.sort(key=lambda line: line[0])
    return seen


def _left(fault: Fault, place: Any) -> list[str]:
    """What there is of a run that has ended: processes get some time to end, as orphans do so on their own."""
    deadline = time.monotonic() + LINGER_SECONDS
    while (processes := marked(place.mark)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    left = [f"process {pid}: {_command(pid)}" for pid in processes]
    names = [f"/dev/shm/{name}" for name in os.listdir(place.shared_memory) if name != "filler"]
    if fault.kind in ("full /dev/shm", "tiny /dev/shm"):  # torch leaves the files that it had no room for
        names = [name for name in names if not name.startswith("/dev/shm/torch_")]
    names += [f"temporary file {name}" for name in os.listdir(place.folder / "tmp") if not name.startswith(_FOREIGN)]
    return left + names


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "has ended meanwhile"


def _stacks(mark: str) -> str:
    """Where the processes of a run are that hangs, if py-spy is there."""
    texts = []
    for pid in marked(mark):
        text = f"{pid}: {_command(pid)}"
        if shutil.which("py-spy"):
            dumped = subprocess.run(
                ["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True
            )
            text += f"\n{dumped.stdout}"
        texts.append(text)
    return "\n".join(texts)[-12000:]


def end_all(mark: str) -> None:
    """Kills all processes of a run."""
    while processes := marked(mark):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
