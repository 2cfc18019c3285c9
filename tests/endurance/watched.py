"""An endless run from outside: started, measured at its quiet moments, and ended when it has done enough."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import TORCH_CACHE
from growth import FEWEST, Growth, growth
from measures import COUNTS, PAGES, measured
from quiet import POLL_SECONDS, go_on, standing
from sandbox import may_have_own_mounts

FOLDER = Path(__file__).parent
_IN_A_KERNEL = (str(FOLDER), str(FOLDER.parents[1] / "notebooks"))
PATIENCE_SECONDS = 600.0
"""Longer than any machine takes for a round; only a run that hangs is waited for so long."""
_OWN_SHARED_MEMORY = """
import os, sys
sys.path.insert(0, sys.argv[1])
import sandbox
sandbox.shrink_shared_memory(4 << 30)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Series:
    """One process over time: at each quiet moment, its measures and what it had done."""

    process: str
    seconds: list[float] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    measures: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in (*PAGES, *COUNTS)})

    def add(self, seconds: float, facts: dict[str, Any], now: dict[str, int]) -> None:
        self.seconds.append(seconds)
        self.operations.append(facts["operations"])
        self.steps.append(facts["steps"])
        self.step_seconds.append(facts["step_seconds"])
        for name, value in now.items():
            self.measures[name].append(value)

    def growths(self) -> list[Growth]:
        """How each measure has grown."""
        return [
            growth(f"{self.process}, {name}", values, self.operations, self.steps)
            for name, values in self.measures.items()
        ]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    name: str
    series: list[Series]

    @property
    def operations(self) -> int:
        """Those of each process; of ranks, all do the same."""
        return self.series[0].operations[-1]

    @property
    def seconds(self) -> float:
        return self.series[0].seconds[-1]

    def growing(self) -> list[str]:
        """A sentence for each measure that grows; none, if the run is steady."""
        return [f"{self.name}: {one}" for series in self.series for one in series.growths() if one.grows]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operations": self.operations,
            "seconds": self.seconds,
            "growths": [one.as_dict() for series in self.series for one in series.growths()],
            "series": [vars(series) for series in self.series],
        }


def ranks(processes: int, seconds: float, *, seed: int = 1, leak: str = "nothing", rounds: int = FEWEST) -> Run:
    """A run of ``processes`` ranks, which ends when both ``seconds`` and ``rounds`` are over.

    Raises:
        AssertionError: it fails or hangs; the message has its output.
    """
    command = [str(Path(sys.executable).parent / "accelerate-cpp"), "launch", "--cpu", "--num_processes"]
    names = ["launcher", *(f"rank{rank}" for rank in range(processes))]
    return _watched(
        f"{processes} ranks",
        names,
        lambda folder: [*command, str(processes), str(FOLDER / "ranks.py"), str(folder), str(seed), leak],
        seconds,
        rounds,
    )


def kernel(times: int, *, leak: str = "nothing") -> Run:
    """A Jupyter kernel that calls ``notebook_launcher`` so many times. Raises as :func:`ranks`."""
    client = [sys.executable, str(FOLDER.parent / "storm" / "kernel.py")]
    return _watched(
        "kernel",
        ["kernel"],
        lambda folder: [*client, f"import kernel; kernel.main({str(folder)!r}, {times}, {leak!r})"],
        0,
        times,
    )


def _watched(name: str, names: Sequence[str], command: Any, seconds: float, rounds: int) -> Run:
    folder = Path(tempfile.mkdtemp(prefix="accelerate_cpp_endurance_"))
    temporary = folder / "temporary"
    temporary.mkdir()
    own = [sys.executable, "-c", _OWN_SHARED_MEMORY, str(FOLDER.parent / "distributed")]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*(own if may_have_own_mounts() else []), *command(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [*_IN_A_KERNEL, os.environ.get("PYTHONPATH")])),
                "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
                "IPYTHONDIR": str(folder / "ipython"),
            },
            start_new_session=True,
        )
    try:
        series = _measure(process, folder, names, seconds, rounds)
        code = process.wait(PATIENCE_SECONDS)
        assert code == 0, f"{name} ended with exit code {code}:\n{_output(folder)}"
        left = [path.name for path in temporary.iterdir() if not path.name.startswith(TORCH_CACHE)]
        assert not left, f"{name} left behind temporary files: {left}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)
    return Run(name, series)


def _measure(
    process: subprocess.Popen[bytes], folder: Path, names: Sequence[str], seconds: float, rounds: int
) -> list[Series]:
    """The series of the processes ``names``; a ``launcher`` is the process that was started, and stands still last."""
    begin = time.monotonic()
    series = [Series(name) for name in names]
    telling = [one for one in series if one.process != "launcher"]
    for moment in range(1 << 30):
        told = {one.process: _await_standing(process, folder, one.process, moment) for one in telling}
        now = time.monotonic() - begin
        for one in series:
            facts = told.get(one.process, told[telling[0].process])
            number = told[one.process]["pid"] if one in telling else process.pid
            one.add(now, facts, measured(number, folder / "temporary"))
        more = now < seconds or moment + 1 < rounds
        for one in telling:
            go_on(folder, one.process, moment, more)
        if not more:
            return series
    raise AssertionError("unreachable")


def _await_standing(process: subprocess.Popen[bytes], folder: Path, name: str, moment: int) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (told := standing(folder, name, moment)) is None:
        assert process.poll() is None, f"{name} ended in round {moment}:\n{_output(folder)}"
        assert time.monotonic() < deadline, f"{name} hangs in round {moment}:\n{_output(folder)}"
        time.sleep(POLL_SECONDS)
    return told


def _output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-20_000:]
