"""Measures contestants against each other on one machine, in turns: A B C A B C …

Each contestant is a group of worker processes that stays alive and waits, asleep, until it is its turn. Rank 0 of each
measures; the medians over the turns are compared, turn by turn, with those of the first contestant, so that whatever
else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

WARM_UP_TURNS = 2


@dataclass(frozen=True)
class Result:
    """Of one contestant in one measurement."""

    contestant: str
    microseconds: float
    """Median over the turns of the median time of a turn."""
    ratio: float
    """Median over the turns of this contestant's time as a fraction of the first contestant's in the same turn."""
    spread: tuple[float, float]
    """First and third quartile of that fraction."""


class Contestant:
    """The worker processes of one contestant."""

    def __init__(self, script: str, name: str, world_size: int) -> None:
        self.name = name
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._workers = [
            subprocess.Popen(
                [sys.executable, script, "--worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
                    "ACCELERATE_USE_CPU": "true",
                },
            )
            for rank in range(world_size)
        ]

    def measure(self, measurement: str) -> float:
        """One turn: microseconds of one operation."""
        for worker in self._workers:
            worker.stdin.write(measurement + "\n")
            worker.stdin.flush()
        line = self._workers[0].stdout.readline()
        if not line:
            raise SystemExit(f"a worker of '{self.name}' ended; its error is above")
        return float(json.loads(line))

    def end(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()


def main(
    script: str, description: str | None, contestants: list[str], measurements: list[str], worker: Callable[[str], None]
) -> None:
    """The command line of a benchmark: the parent prints the table, and runs ``script`` again for its workers."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="how often each contestant is measured")
    parser.add_argument("--only", nargs="+", default=measurements, choices=measurements, help="which measurements")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(script, contestants, arguments.only, arguments.turns)


def serve(measure: Callable[[str], float]) -> None:
    """Runs in a worker: answers turns until the parent closes the pipe. ``measure`` returns microseconds."""
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)


def compare(script: str, names: list[str], measurements: list[str], turns: int, world_size: int = 2) -> None:
    """Runs all measurements and prints a Markdown table, one row per measurement and contestant."""
    contestants = [Contestant(script, name, world_size) for name in names]
    print("| measurement | contestant | time | fraction of the first | quartiles |")
    print("|--|--|--|--|--|")
    try:
        for measurement in measurements:
            for result in _rounds(contestants, measurement, turns):
                low, high = result.spread
                print(
                    f"| {measurement} | {result.contestant} | {result.microseconds:,.0f} µs | {result.ratio:.3f} "
                    f"| {low:.3f} to {high:.3f} |",
                    flush=True,
                )
    finally:
        for contestant in contestants:
            contestant.end()


def _rounds(contestants: list[Contestant], measurement: str, turns: int) -> list[Result]:
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(WARM_UP_TURNS + turns):
        for contestant in contestants:
            microseconds = contestant.measure(measurement)
            if turn >= WARM_UP_TURNS:
                times[contestant.name].append(microseconds)
    first = times[contestants[0].name]
    results = []
    for name, own in times.items():
        fractions = [mine / peer for mine, peer in zip(own, first, strict=True)]
        low, _, high = statistics.quantiles(fractions, n=4)
        results.append(Result(name, statistics.median(own), statistics.median(fractions), (low, high)))
    return results
