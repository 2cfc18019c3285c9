"""What happens to a run from outside: signals, disks, networks and clocks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tests.storm.draw import LAUNCHER, SIGNALS, Fault
from tests.storm.inside import OF_RUNS, from_outside, write
from tests.storm.starting import Surroundings, fill, marked

from network_namespaces import INTERFACE, Host

PAUSE_SECONDS = 1.0
"""How long a rank stops that is continued."""


def read(path: Path) -> dict[str, Any] | None:
    """What a process has told by this file, if it has."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return told


def is_awaited(fault: Fault) -> bool:
    """Whether the run waits for this process to do something."""
    return fault.rank == LAUNCHER or fault.kind in OF_RUNS or from_outside(fault)


class Output(Protocol):
    """Where a standard output goes."""

    def close(self) -> None:
        """Nobody reads it any more."""


def inject(
    fault: Fault,
    place: Surroundings,
    started: list[subprocess.Popen[bytes]],
    outputs: Sequence[Output],
    announced: dict[str, Any],
) -> str:
    """Does to the run what ``fault`` says; returns what became of that: empty if it happened."""
    time.sleep(fault.delay)
    at = time.monotonic()
    missed = ""
    if fault.kind in (*SIGNALS, "stop", "stop and continue"):
        number = getattr(signal, f"SIG{fault.kind}") if fault.kind in SIGNALS else signal.SIGSTOP
        target = announced["pid"] if fault.rank != LAUNCHER else _launcher(fault, place, started)
        if _has_ended(target) or not _is_hit(target, number):
            missed = "the process had ended"
    else:
        _change_surroundings(fault, place, outputs)
    write(place.folder / "injected", {"pid": os.getpid(), "at": at, "how": missed})
    if fault.kind == "stop and continue":
        time.sleep(PAUSE_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGCONT)
    return missed


def _is_hit(pid: int, number: signal.Signals) -> bool:
    """Sends the signal; returns whether it came in time, where that shows: what is ending cannot be stopped."""
    os.kill(pid, number)
    while number == signal.SIGSTOP and _state(pid) != "T":
        if _has_ended(pid):
            return False
        time.sleep(0.001)
    return True


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to ask how it ended."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    """What a process does, as the system's letter; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def _launcher(fault: Fault, place: Surroundings, started: list[subprocess.Popen[bytes]]) -> int:
    """The process that starts the ranks; in a notebook that is its kernel."""
    if fault.start == "kernel":
        for pid in sorted(marked(place.mark)):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if b"ipykernel_launcher" in command and parent == started[0].pid:
                    return pid
    return started[0].pid


def dropped_packets(fault: Fault, place: Surroundings) -> int:
    """How many packets the network between the hosts of a run has lost."""
    return sum(
        map(int, re.findall(r"counter packets (\d+)", _host(fault, place).nft("list", "table", "inet", "storm")))
    )


def _host(fault: Fault, place: Surroundings) -> Host:
    """That of the rank that is hit."""
    assert place.hosts is not None
    return place.hosts[max(fault.rank, 0) * 2 // fault.size]


def _change_surroundings(fault: Fault, place: Surroundings, outputs: Sequence[Output]) -> None:
    if fault.kind == "full disk":
        fill(place.project)
    elif fault.kind == "read-only folder":
        subprocess.run(["mount", "-o", "remount,ro", str(place.project)], check=True, capture_output=True)
    elif fault.kind in ("lost packets", "cut network"):
        chance = "" if fault.kind == "cut network" else f"numgen random mod 100 < {fault.percent} "
        for rule in (
            "add table inet storm",
            "add chain inet storm in { type filter hook input priority 0 ; }",
            f"add rule inet storm in iifname {INTERFACE} {chance}counter drop",
        ):
            _host(fault, place).nft(*rule.split())
    elif fault.kind == "clock set back":
        place.clock.write_text("-3600")
    elif fault.kind == "closed stdout":
        for output in outputs:
            output.close()
