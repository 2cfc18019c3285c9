"""What a process of a run does about its fault: it tells where it is, waits for the fault, or does it to itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.storm.draw import AFTER, BEFORE, LAUNCHER, SIGNALS, Fault

FAULT, FOLDER, GROUP = "ACCELERATE_CPP_STORM_FAULT", "ACCELERATE_CPP_STORM_FOLDER", "ACCELERATE_CPP_STORM_GROUP"
"""Variables: the fault as a line of JSON, the folder of the run, and a control group that may be limited."""
MARK = "ACCELERATE_CPP_STORM"
"""The variable that all processes of a run have."""
MESSAGE = "the storm raised this"
CLOCK_SEEN = "the storm has set this clock back"
# Done to the whole run by the process that watches it.
OF_RUNS = ("full disk", "read-only folder", "lost packets", "cut network", "clock set back", "closed stdout")
_OF_CHECKPOINTS = ("truncated checkpoint", "flipped checkpoint")
_DEVIATIONS = ("mismatched collective", "missing collective")
_FROM_OUTSIDE = (*SIGNALS, "stop")
_MOST_MEMORY = 64 << 20
LONGEST_HOLD = 10.0  # seconds
# Where the others wait for a fault from outside that hits a phase in which they are needed, or that they do not have.
_NEXT_OF_ALL = {"forward": "step", "backward": "step", "tracker": "save"}


class Strike:
    """The fault as one process of the run sees it; of processes of data loaders there is one each."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self._folder, self._is_over = fault, folder, False

    @classmethod
    def of_environment(cls) -> Strike:
        return cls(Fault.parse(os.environ[FAULT]), Path(os.environ[FOLDER]))

    @property
    def comes_from_outside(self) -> bool:
        """Whether the process that watches the run does it, once the rank has announced itself."""
        return from_outside(self.fault)

    @property
    def happens_inside(self) -> bool:
        """Whether it happens in the middle of a call of the package; elsewhere all come before the call, and wait."""
        fault = self.fault
        return not (self.comes_from_outside or fault.kind in (*OF_RUNS, *_OF_CHECKPOINTS) or fault.rank == LAUNCHER)

    def reach(self, phase: str, step: int, in_loader: bool = False) -> bool:
        """This process has come to ``phase``; returns whether it must deviate from what the others do there."""
        fault = self.fault
        rank = int(os.environ["RANK"])
        is_hit = rank == max(fault.rank, 0)
        awaited = fault.phase if is_hit else phase_of_others(fault)
        if self._is_over or phase != awaited or (phase_has_steps(phase) and step != fault.step):
            return False
        self._is_over = True
        if phase == "data" and not in_loader:
            return False
        if fault.kind in OF_RUNS or fault.rank == LAUNCHER:
            if is_hit:
                before = time.time()
                write(self._folder / "announced", {"pid": os.getpid(), "at": time.monotonic()})
                self._await_injection()
                if fault.kind == "clock set back" and time.time() < before:
                    print(CLOCK_SEEN, flush=True)
        elif self.comes_from_outside:
            if is_hit:
                write(self._folder / "announced", {"pid": os.getpid(), "at": time.monotonic()})
            else:
                self._await_injection()
        elif fault.kind in _OF_CHECKPOINTS:
            if is_hit:
                self.record(_damage(self._folder, fault))
            self._await_injection()
        elif is_hit:
            self.record()
            if fault.kind in _DEVIATIONS:
                return True
            self._happen()
        return False

    def record(self, how: str = "") -> None:
        """Tells the process that watches the run that the fault is happening now."""
        write(self._folder / "injected", {"pid": os.getpid(), "at": time.monotonic(), "how": how})

    def _await_injection(self) -> None:
        """Waits for the fault, but not for ever: the rank that it is to hit may need this one to get there."""
        deadline = time.monotonic() + LONGEST_HOLD
        while not (self._folder / "injected").exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _happen(self) -> None:
        kind = self.fault.kind
        if kind in SIGNALS:
            os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "sys.exit(0)":
            sys.exit(0)
        elif kind in ("os._exit(0)", "os._exit(3)"):
            os._exit(int(kind[-2]))
        elif kind == "exception":
            raise ValueError(MESSAGE)
        elif kind == "segfault":
            import ctypes

            ctypes.string_at(0)
        elif kind == "out of memory":
            _take_memory(self.record)
        elif kind == "no descriptors":
            _take_descriptors()


def phase_has_steps(phase: str) -> bool:
    """Whether a run is in this phase once a step."""
    return phase not in (*BEFORE, *AFTER)


def from_outside(fault: Fault) -> bool:
    """Whether the process that watches the run does it to the rank, once that has announced itself."""
    return fault.kind == "stop and continue" or (fault.within and fault.kind in _FROM_OUTSIDE)


def phase_of_others(fault: Fault) -> str:
    """Where the ranks that are not hit wait for the fault, so that the rank that is does not get past the phase."""
    if from_outside(fault) and (fault.training == "pipeline" or fault.phase == "tracker"):
        return _NEXT_OF_ALL.get(fault.phase, fault.phase)  # the stages of a pipeline need each other
    return fault.phase


def write(path: Path, content: dict[str, object]) -> None:
    """Writes the file in one step."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content))
    part.rename(path)


def _take_descriptors() -> None:
    """Leaves this process not one descriptor more than it has."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def _take_memory(record: Callable[[], None]) -> None:
    """Uses more memory than a control group of this process alone allows; where there is none, than its own limit.

    Args:
        record: called before each part is taken. Until the last one, there is nothing that anybody could know.
    """
    group = os.environ.get(GROUP)
    if group is None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    else:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        record()
        taken.append(bytearray(os.urandom(1 << 20)))


def _damage(folder: Path, fault: Fault) -> str:
    """Spoils a file of the newest checkpoint, and returns its path."""
    checkpoints = sorted((folder / "project" / "checkpoints").glob("checkpoint_*"))
    files = sorted(path for path in checkpoints[-1].rglob("*") if path.is_file() and path.stat().st_size > 1)
    file = files[fault.index % len(files)]
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if fault.kind == "truncated checkpoint":
        del content[middle:]
    else:
        content[middle] ^= 0x40
    file.write_bytes(content)
    return str(file.relative_to(folder))
