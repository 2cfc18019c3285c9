"""Measures contestants against each other on one machine, in turns: A B C A B C …

Each contestant is a group of worker processes that stays alive. Between its turns every worker sleeps in a read of its
socket, and a turn is over only when all workers of the group sleep again, so that no contestant disturbs another. Rank
0 times every operation; its median and mean are those of the turn. The medians over the turns are compared, turn by
turn, with those of the first contestant, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import as_document, print_heading, print_results, write_json
from workers import SOCKET_VARIABLE, Contestant, Group, own_rank

WARM_UP_TURNS = 2


@dataclass(frozen=True)
class Measurement:
    """What is measured, and who takes part in it."""

    name: str
    contestants: tuple[str, ...]
    """The first that is there is what the others are compared with."""


@dataclass(frozen=True)
class Result:
    """Of one contestant in one measurement."""

    measurement: Measurement
    processes: int
    contestant: str
    median_us: float
    """Median over the turns of the median time of a turn, in microseconds."""
    mean_us: float
    """The same of the mean time of a turn: above the median when some operations stall."""
    fraction: float
    """Median over the turns of the median time of a turn as a fraction of the first contestant's in that turn."""
    quartiles: tuple[float, float]
    """First and third quartile of that fraction."""
    turns_us: list[float]
    """The median time of each turn."""


def serve(measure: Callable[[str], list[float]]) -> None:
    """Runs in a worker: answers turns until the parent closes the socket. ``measure`` returns the seconds of each
    operation of a turn.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(json.dumps(own_rank()), file=lines, flush=True)
            while line := lines.readline():
                try:
                    seconds = measure(json.loads(line))
                except BaseException:
                    print(json.dumps({"failed": traceback.format_exc()}), file=lines, flush=True)
                    raise
                turn = {"median_us": statistics.median(seconds) * 1e6, "mean_us": statistics.fmean(seconds) * 1e6}
                print(json.dumps(turn), file=lines, flush=True)


def command_line(description: str | None, contestants: Sequence[Contestant]) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contestant.name for contestant in contestants]
    parser.add_argument("--turns", type=int, default=15, help="how often each contestant is measured")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="measurements, as in 'all_reduce fp32*'")
    parser.add_argument("--contestants", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--processes", nargs="+", type=int, default=[2], help="of each contestant, one after another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def run(
    description: str | None,
    worker: Callable[[str], None],
    measurements: Sequence[str],
    names: Sequence[str],
    processes: Sequence[int] = (2,),
) -> None:
    """The whole of a benchmark in which all of ``names`` take part in all of ``measurements``.

    Args:
        description: what ``--help`` says.
        worker: what a process of a contestant, whose name it is given, does.
        processes: how many each contestant has, unless the command line says otherwise.
    """
    contestants = [Contestant(name) for name in names]
    parser = command_line(description, contestants)
    parser.set_defaults(processes=list(processes))
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, lambda _: [Measurement(name, tuple(names)) for name in measurements])


def seconds_of_each(call: Callable[[], object], count: int) -> list[float]:
    """How long each of so many calls takes."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def compare(
    arguments: argparse.Namespace,
    contestants: Sequence[Contestant],
    measurements: Callable[[int], Sequence[Measurement]],
    least_processes: int = 1,
) -> dict[str, Any]:
    """Runs the measurements that ``arguments`` ask for, prints their tables and returns all as a document for JSON.

    Args:
        arguments: of :func:`command_line`.
        contestants: those that the benchmark knows.
        measurements: for a number of processes.
        least_processes: with fewer there is nothing to measure.
    """
    if min(arguments.processes) < least_processes or arguments.turns < 1:
        raise SystemExit(f"--processes must be at least {least_processes} and --turns at least 1")
    plan = {processes: _chosen(measurements(processes), arguments) for processes in arguments.processes}
    if not any(plan.values()):
        known = "\n  ".join(dict.fromkeys(each.name for count in plan for each in measurements(count)))
        raise SystemExit(f"nothing to measure: no contestant and measurement are chosen; there are\n  {known}")
    invited = [contestant for contestant in contestants if contestant.name in arguments.contestants]
    results: list[Result] = []
    for processes, chosen in plan.items():
        wanted = {name for measurement in chosen for name in measurement.contestants}
        if chosen:
            print_heading(processes, [one for one in invited if one.absent and one.name in wanted])
            present = [one for one in invited if not one.absent and one.name in wanted]
            results += _compare_groups(present, processes, chosen, arguments.turns)
    document = as_document(results)
    if arguments.json:
        write_json(document, arguments.json)
    return document


def _chosen(measurements: Sequence[Measurement], arguments: argparse.Namespace) -> list[Measurement]:
    return [
        measurement
        for measurement in measurements
        if any(fnmatch.fnmatchcase(measurement.name, pattern) for pattern in arguments.only or ["*"])
        and not set(measurement.contestants).isdisjoint(arguments.contestants)
    ]


def _compare_groups(
    contestants: Sequence[Contestant], processes: int, measurements: Sequence[Measurement], turns: int
) -> list[Result]:
    groups: dict[str, Group] = {}
    results: list[Result] = []
    try:
        for contestant in contestants:
            groups[contestant.name] = Group(sys.argv[0], contestant, processes)
        for measurement in measurements:
            taking_part = [groups[name] for name in measurement.contestants if name in groups]
            results += print_results(_rounds(taking_part, measurement, processes, turns))
        for group in groups.values():
            group.end()
    finally:
        for group in groups.values():
            group.kill()
    return results


def _rounds(groups: Sequence[Group], measurement: Measurement, processes: int, turns: int) -> list[Result]:
    medians: dict[str, list[float]] = {group.name: [] for group in groups}
    means: dict[str, list[float]] = {group.name: [] for group in groups}
    for turn in range(WARM_UP_TURNS + turns):
        for group in groups:
            answer = group.turn(measurement.name)
            if turn >= WARM_UP_TURNS:
                medians[group.name].append(answer["median_us"])
                means[group.name].append(answer["mean_us"])
    results = []
    for name, own in medians.items():
        fractions = [mine / first for mine, first in zip(own, medians[groups[0].name], strict=True)]
        results.append(
            Result(
                measurement,
                processes,
                name,
                statistics.median(own),
                statistics.median(means[name]),
                statistics.median(fractions),
                _quartiles(fractions),
                own,
            )
        )
    return results


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
