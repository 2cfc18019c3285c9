"""What must hold after a fault, and whether it did."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.storm.draw import AFTER, BEFORE, LAUNCHER, SIGNALS, Fault
from tests.storm.inside import CLOCK_SEEN, MESSAGE, phase_of_others
from tests.storm.program import SHORT_TIMEOUT, needs_timeout
from tests.storm.sites import lines_of_waits

MP_STATUS_CHECK_INTERVAL = 5.0
"""Seconds; torch.utils.data._utils has the same number."""
END_SECONDS = 60.0
"""How long a run may last after the moment at which somebody could know of its fault, on a machine that is busy."""
_NUMBERS = {"KILL": 9, "TERM": 15, "INT": 2, "HUP": 1, "QUIT": 3}
_SENTENCE = re.compile(
    r"^(?:accelerate-cpp: |[\w.]*FunctionFailed: )?rank (\d+)(?: \(host[^)]*\))? "
    r"(?:failed:|failed first|left first|did not answer)",
    re.MULTILINE,
)
# As in "gather at program.py:90 on rank 0 waited for rank 2", or in a traceback.
_PLACE = re.compile(r"(?<!workers/)program\.py(?::|\", line )(\d+)")
# What ends as if nothing had happened.
HARMLESS = ("stop and continue", "clock set back")
# What a run may survive: what it needs is not always what was taken from it.
MAYBE_HARMLESS = (
    *("full /dev/shm", "tiny /dev/shm", "no descriptors", "closed stdout", "lost packets"),
    *("truncated checkpoint", "flipped checkpoint"),
)
_STATUS_OF_LOST_OUTPUT = 120  # of Python, where what it has left to print at its end cannot be written
# What hits all ranks alike, so that any may be named.
_OF_ALL = (
    *("full /dev/shm", "tiny /dev/shm", "full disk", "read-only folder", "closed stdout", "cut network"),
    *("lost packets", "mismatched collective", "missing collective", "truncated checkpoint", "flipped checkpoint"),
)
_TELLS = {
    "sys.exit(0)": r"SystemExit|left first|has left|has ended|exitcode +: 0|exit code 0|ended with",
    "os._exit(0)": r"left first|has left|has ended|exitcode +: 0|exit code 0|ended with",
    "os._exit(3)": r"exit code 3|exitcode *: 3|Exit code: +3",
    "exception": MESSAGE,
    "segfault": r"SIGSEGV|signal 11",
    "out of memory": r"SIGKILL|signal 9|MemoryError",
    "mismatched collective": r"MismatchedCollective",
    "missing collective": r"MismatchedCollective|Timeout|PeerLost",
    "full disk": r"No space left",
    "read-only folder": r"Read-only",
    "no descriptors": r"Too many open files|descriptor",
    "full /dev/shm": r"shared memory|No space left|shm|Bus error|SIGBUS",
    "tiny /dev/shm": r"shared memory|No space left|shm|Bus error|SIGBUS",
    "closed stdout": r"Broken ?[Pp]ipe|SIGPIPE",
    "stop": r"Timeout|timed out|stopped",
    "cut network": r"Timeout|timed out|PeerLost|reset by peer|closed by peer",
    "truncated checkpoint": r"CheckpointError",
    "flipped checkpoint": r"CheckpointError",
    "lost packets": r"Timeout|timed out|PeerLost|reset by peer|closed by peer",
}


@dataclass
class Seen:
    """What was seen of a run.

    Attributes:
        missed: why the fault could not happen, if so.
        injected_at: by the monotonic clock; ``None`` if the run did not get so far.
        ended_at: when all had ended that was started; ``None`` if they had to be killed.
        statuses: of the processes that were started by hand; negative for a signal.
        lines: of what they printed, each with its time.
        left: what was there afterwards of processes, files and shared memory.
        how: what the fault did, in words.
        dropped: how many packets the network between the hosts has lost.
    """

    missed: str = ""
    injected_at: float | None = None
    ended_at: float | None = None
    statuses: list[int] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    checkpoint: str = ""
    how: str = ""
    where: str = ""
    dropped: int = 0


@dataclass(frozen=True)
class Verdict:
    """Whether all held; ``failures`` names what did not."""

    failures: list[str]
    seconds_to_end: float | None
    seconds_to_name: float | None
    is_named: bool | None


def judge(fault: Fault, seen: Seen) -> Verdict:
    """Holds what was ``seen`` of the run against what must be."""
    failures = []
    if seen.ended_at is None:
        failures.append("hung")
    if seen.injected_at is None:
        failures.append("not reached")
        return Verdict(failures, None, None, None)
    after = [(at, text) for at, text in seen.lines if at >= seen.injected_at]
    whole = "\n".join(text for _, text in after)
    if seen.ended_at is not None and not status_fits(fault, seen):
        failures.append(f"status {seen.statuses}")
    if fault.kind == "clock set back" and CLOCK_SEEN not in whole:
        failures.append("the clock went on")
    if fault.kind == "cut network" and not seen.dropped:
        failures.append("no packet was dropped")
    spoiled = seen.how.rpartition("/")[2] if "checkpoint" in fault.kind else ""
    if spoiled not in whole:  # whether it was refused or skipped
        failures.append(f"not told: {spoiled}")
    needs_names = names_are_due(fault, seen)
    seconds_to_name = None
    is_named = None
    if needs_names:
        missing = unnamed(fault, whole)
        is_named = not missing
        failures += [f"not named: {what}" for what in missing]
        seconds_to_name = next((at - seen.injected_at for at, text in after if _names_rank(fault, text)), None)
    failures += [f"left: {what}" for what in seen.left]
    if seen.checkpoint:
        failures.append(f"checkpoint: {seen.checkpoint}")
    took = None if seen.ended_at is None else seen.ended_at - seen.injected_at
    silence = SHORT_TIMEOUT.total_seconds() if needs_timeout(fault) else 0.0
    if (
        took is not None
        and took > silence + END_SECONDS
        and not ends_well(fault, seen)
        and fault.kind != "lost packets"
    ):
        failures.append(f"ended after {took:.0f} s")
    return Verdict(failures, took, seconds_to_name, is_named)


def ends_well(fault: Fault, seen: Seen) -> bool:
    return bool(seen.statuses) and not any(seen.statuses)


def is_harmless(fault: Fault, seen: Seen) -> bool:
    """Whether the run must end as if nothing had happened."""
    if seen.missed or fault.kind in HARMLESS:
        return True
    return fault.phase == "exit" and fault.kind in ("os._exit(0)", "sys.exit(0)")


def names_are_due(fault: Fault, seen: Seen) -> bool:
    """Whether a rank is to be named: the run has failed, and nobody who was started by hand was hit."""
    if is_harmless(fault, seen) or fault.rank == LAUNCHER:
        return False
    if fault.kind == "closed stdout" and fault.start in ("notebook", "mpirun"):
        return False  # what prints is the process that was started
    may_end_well = fault.kind in MAYBE_HARMLESS or fault.phase == "end"
    return not (may_end_well and ends_well(fault, seen))


def status_fits(fault: Fault, seen: Seen) -> bool:
    """Whether whoever was started ended with the right exit status."""
    if is_harmless(fault, seen):
        return ends_well(fault, seen)
    if ends_well(fault, seen):
        return fault.kind in MAYBE_HARMLESS or (fault.phase == "end" and "exit(0)" in fault.kind)
    if fault.rank == LAUNCHER:
        return _status_of_launcher(fault, seen)
    if fault.start == "mpirun":
        return seen.statuses[0] != 0
    if fault.kind == "closed stdout" and seen.statuses == [_STATUS_OF_LOST_OUTPUT]:
        return True
    if fault.start in ("torchrun", "notebook", "kernel"):
        return seen.statuses == [1]
    wanted = _status_of_rank(fault)
    if fault.start == "hosts":  # a launcher without the rank that was hit has a status of its own
        return any(status in wanted for status in seen.statuses) and {*seen.statuses} <= {0, 1, *wanted}
    return seen.statuses[0] in wanted


def _status_of_rank(fault: Fault) -> tuple[int, ...]:
    """The exit status of a launch for what has hit one of its ranks, or one of several."""
    if fault.phase == "data":
        return (1,)  # the rank finds that its loader has failed
    if fault.kind in SIGNALS:
        return (128 + _NUMBERS[fault.kind],)
    several = {
        "os._exit(3)": (3,),
        "segfault": (139,),
        "out of memory": (137, 1, 134),  # the system kills the process, or Python or C++ finds no memory
        "full /dev/shm": (1, 135),  # an error of the system, or a signal where memory is written that has no room
        "tiny /dev/shm": (1, 135),
        "closed stdout": (1, _STATUS_OF_LOST_OUTPUT),
    }
    return several.get(fault.kind, (1,))


def _status_of_launcher(fault: Fault, seen: Seen) -> bool:
    number, status = _NUMBERS[fault.kind], seen.statuses[0]
    if fault.start in ("launch", "hosts") and fault.kind != "KILL":
        return status == 128 + number
    if fault.start in ("mpirun", "torchrun", "kernel"):
        return status != 0
    return status == -number


def _names_rank(fault: Fault, text: str) -> bool:
    rank = r"\d+" if fault.kind in _OF_ALL else fault.rank
    if fault.kind in ("mismatched collective", "missing collective"):
        return re.search(rf"\brank {rank}\b", text) is not None
    blamed = (
        rf"\brank {rank}( \(host [^)]*\))? (failed|left|has|had|was|is|stopped|did)\b|because of rank {rank}\b"
        rf"|waited .*for (rank|ranks [\d, -]*) ?{rank}\b|from rank {rank}\b.*: nothing came for"
        rf"|^\s*rank +: {rank} \(local|^\[rank{rank}\]:"
    )
    if fault.start == "mpirun":
        blamed += rf"|\[\[\d+,\d+\],{rank}\]"
    return re.search(blamed, text) is not None


def seconds_of_silence(fault: Fault) -> float | None:
    """How long nobody can know of the fault: until the timeout of the process group, where it shows only by it.

    ``None`` where that depends on when the others begin to wait: for one that is gone before the group has formed.
    That a rank is stopped is seen by its launcher, where that is one of ours. Torch looks from time to time whether the
    processes of its loaders still live, and is told at once only of those that failed.
    """
    if fault.phase == "data" and "exit(0)" in fault.kind:
        return MP_STATUS_CHECK_INTERVAL
    if fault.kind == "lost packets":
        return None  # enough of them may be lost at any time
    is_seen = fault.kind == "stop" and fault.phase != "data" and fault.start != "torchrun"
    shows_late = needs_timeout(fault) and not is_seen
    if fault.phase in BEFORE and (shows_late or "exit(0)" in fault.kind):
        return None
    return SHORT_TIMEOUT.total_seconds() if shows_late else 0.0


def unnamed(fault: Fault, text: str) -> list[str]:
    """What ``text`` does not tell although it must."""
    missing = []
    lines = text.splitlines()
    if not any(_names_rank(fault, line) for line in lines):
        missing.append("rank")
    if fault.start in ("launch", "hosts", "notebook", "kernel") and fault.kind not in _OF_ALL:
        first = _SENTENCE.findall(text)
        those = first if fault.start == "hosts" else first[-1:]  # there, each launcher says what has hit it
        those = [*those, *re.findall(r"because of rank (\d+), which another launcher", text)]
        if first and str(fault.rank) not in those:
            missing.append(f"rank in the last sentence ({first[-1]} instead of {fault.rank})")
    tells = rf"SIG{fault.kind}|[Ss]ignal {_NUMBERS[fault.kind]}\b" if fault.kind in SIGNALS else _TELLS[fault.kind]
    if fault.kind == "INT":
        tells += "|KeyboardInterrupt"
    says_farewell = fault.kind == "sys.exit(0)" and fault.rank != 0  # the store, which has it, ends with rank 0
    if fault.start == "hosts" and "exit(0)" in fault.kind and not says_farewell:
        name = f"rank {fault.rank}" if fault.size == 2 else "(a rank|rank \\d+)"
        tells += f"|{name} was lost"  # the other host sees no more of it
    if fault.phase in BEFORE and "exit(0)" in fault.kind and needs_timeout(fault):
        tells += r"|did not all join within|did not answer"  # the others know no more
    if fault.phase == "data" and fault.kind not in ("exception", "stop", "full /dev/shm", "tiny /dev/shm"):
        tells = r"DataLoader worker"
    if not re.search(tells, text):
        missing.append(f"cause ({tells})")
    if place_is_due(fault):
        places = set(map(int, _PLACE.findall(text)))
        if not places:
            missing.append("place")
        elif operation_is_due(fault) and not places & _lines_where_others_wait(fault):
            missing.append(f"operation ({fault.phase}, but lines {sorted(places)} of program.py)")
    return missing


def _lines_where_others_wait(fault: Fault) -> frozenset[int]:
    """Around the phase, and around that to which the others go on: they wait in the call after it, or in the next."""
    return lines_of_waits(fault.phase) | lines_of_waits(phase_of_others(fault))


def place_is_due(fault: Fault) -> bool:
    """Whether file and line are to be named: by the rank itself, or by those that wait for it."""
    if fault.phase in (*BEFORE, *AFTER):
        return fault.kind == "exception"
    return fault.start in ("launch", "hosts", "notebook", "kernel")


def operation_is_due(fault: Fault) -> bool:
    """Whether the place that is named must be that of the phase.

    What the fault takes away may be missed later, and torch tells the end of a loader's process at any place.
    """
    if fault.phase in (*BEFORE, "data", *AFTER):
        return False
    return fault.kind not in ("lost packets", "closed stdout", "no descriptors")


def row(fault: Fault, seen: Seen, verdict: Verdict) -> dict[str, Any]:
    """The line of a run in the file of results."""
    return {
        "fault": fault.__dict__,
        "ok": not verdict.failures,
        "failures": verdict.failures,
        "missed": seen.missed,
        "statuses": seen.statuses,
        "seconds_to_end": _rounded(verdict.seconds_to_end),
        "seconds_to_name": _rounded(verdict.seconds_to_name),
        "seconds_of_silence": seconds_of_silence(fault),
        "named": verdict.is_named,
        "how": seen.how,
        "output": "\n".join(_told(seen))[-8000:],
        **({"where": seen.where} if seen.where else {}),
        **({"dropped": seen.dropped} if fault.kind in ("lost packets", "cut network") else {}),
    }


def _told(seen: Seen) -> list[str]:
    """What was printed, each line with the seconds since the fault."""
    start = seen.lines[0][0] if seen.injected_at is None and seen.lines else seen.injected_at or 0.0
    return [f"{at - start:8.3f} {text}" for at, text in seen.lines]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
