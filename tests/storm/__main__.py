"""Runs a storm: ``python -m tests.storm --count 1000 --seed 1 --jobs 3``; see :mod:`tests.storm`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from tests.storm import ROOT
from tests.storm.draw import KINDS, Fault, draw
from tests.storm.table import are_late, summary, table

_OWN_MOUNTS = "ACCELERATE_CPP_STORM_MOUNTS"
_EVERY = 25


def main() -> int:
    """Runs what the command line asks for; returns 1 if something did not hold."""
    arguments = _arguments()
    if arguments.table is not None:
        print(table(_rows(arguments.table)))
        return 0
    _enter_own_mounts()
    if arguments.replay is not None:
        seed, _, index = arguments.replay.partition(":")
        faults = [draw(int(seed), int(index))]
    else:
        indices = range(arguments.first, arguments.first + arguments.count)
        faults = [fault for fault in (draw(arguments.seed, index) for index in indices) if _is_asked(fault, arguments)]
    name = f"storm-{arguments.seed}" if arguments.replay is None else f"storm-{arguments.replay.replace(':', '-')}"
    path = arguments.out or ROOT / "out" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with path.open("w") as file:
        for row in _storm(faults, arguments.jobs):
            rows.append({name: value for name, value in row.items() if name not in ("output", "where")})
            if not (row.get("failures") or arguments.replay):
                row.pop("output", None)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if arguments.replay is not None:
                print(json.dumps(rows[-1], indent=1), row.get("output", ""), row.get("where", ""), sep="\n")
            elif row.get("failures"):
                print(_line(row), flush=True)
            if len(rows) % _EVERY == 0:
                print(f"{len(rows)} of {len(faults)}: {summary(rows)}", flush=True)
    print(table(rows))
    print(f"{len(rows)} faults: {summary(rows)}; each is a line of {path}")
    return int(any(row.get("failures") for row in rows) or are_late(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description="Hits small runs with faults.")
    parser.add_argument("--count", type=int, default=50, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="decides about all of them")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at a time")
    parser.add_argument("--only", action="append", default=[], help="a word of the faults to run, such as a kind")
    parser.add_argument("--replay", metavar="SEED:INDEX", help="one fault, with all that its run printed")
    parser.add_argument("--out", type=Path, help="the file of results; out/storm-SEED.jsonl by default")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of such a file, as Markdown")
    return parser.parse_args()


def _is_asked(fault: Fault, arguments: argparse.Namespace) -> bool:
    return set(arguments.only) <= {fault.kind, fault.phase, fault.start, fault.training}


def _enter_own_mounts() -> None:
    """File systems that runs get are seen by them only, and end with this process, however it ends."""
    if os.geteuid() != 0 or _OWN_MOUNTS in os.environ or shutil.which("unshare") is None:
        return
    command = ["unshare", "--mount", sys.executable, "-m", "tests.storm", *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, _OWN_MOUNTS: "1"})


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _line(row: dict[str, Any]) -> str:
    fault = Fault(**row["fault"])
    told = f"{fault.kind} in {fault.phase}, rank {fault.rank} of {fault.size}, {fault.training} by {fault.start}"
    return f"{fault.seed}:{fault.index} ({told}): {'; '.join(row['failures'])[:600]}"


def _storm(faults: list[Fault], jobs: int) -> Iterator[dict[str, Any]]:
    """The results of all faults, as they come. When this process is interrupted, all runs are ended."""
    from tests.storm.one_run import end_all, run

    from rank_process import end_zygotes

    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell lets what it starts in the background ignore it
    waiting = iter(faults)
    with ThreadPoolExecutor(jobs) as threads:
        try:
            running: set[Future[dict[str, Any]]] = {threads.submit(run, fault) for fault in islice(waiting, jobs)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    running |= {threads.submit(run, fault) for fault in islice(waiting, 1)}
                    yield one.result()
        finally:
            if interrupted.is_set():
                for fault in faults:
                    end_all(f"storm-{os.getpid()}-{fault.seed}-{fault.index}")
            threads.shutdown(cancel_futures=True)
            end_zygotes()


if __name__ == "__main__":
    started = time.monotonic()
    status = main()
    print(f"{time.monotonic() - started:.0f} s, {len(KINDS)} kinds", file=sys.stderr)
    sys.exit(status)
