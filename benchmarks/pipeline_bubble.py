"""How long the ranks of a pipeline wait in a step, by schedule, and what the formula says.

A transformer of 8 equal blocks of width 512 in two processes: a step of 4 or 8 micro-batches of 128 tokens. Measured is
the share of ``train_batch`` in which the main thread of a rank waits for another (``time_waited`` of the C++ core), as
a mean over both ranks; the formula is ``bubble_fraction``. Schedules take turns, and medians over the turns are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_parallel import BLOCKS, WIDTH, Block, square
from torch import nn
from workers import SOCKET_VARIABLE, Contestant, Group, own_rank

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MICRO_BATCHES = (4, 8)
TOKENS = 128
WARM_UP_TURNS = 1


class Measured:
    """The pipelines of a schedule on this rank, for each number of micro-batches."""

    def __init__(self, schedule: str) -> None:
        self._schedule = schedule
        self._batches: dict[int, Callable[[], object]] = {}
        self._steps: dict[int, Callable[[], object]] = {}

    def turn(self, micro_batches: int, steps: int) -> dict[str, float]:
        """The seconds of a batch without the optimizer's step, and the share of them in which ranks wait."""
        from accelerate_cpp._native import time_waited

        if micro_batches not in self._steps:
            self._batches[micro_batches], self._steps[micro_batches] = self._prepared(micro_batches)
            self._batches[micro_batches]()  # finds out what stages pass on
            self._steps[micro_batches]()
        seconds = waited = 0.0
        for _ in range(steps):
            dist.barrier()
            began, waited_before = time.perf_counter(), time_waited()
            self._batches[micro_batches]()
            seconds += time.perf_counter() - began
            waited += (time_waited() - waited_before).total_seconds()
            self._steps[micro_batches]()
        both = torch.tensor([seconds, waited], dtype=torch.float64)
        dist.all_reduce(both)
        return {"seconds": float(both[0]) / steps / dist.get_world_size(), "share": float(both[1] / both[0])}

    def _prepared(self, micro_batches: int) -> tuple[Callable[[], object], Callable[[], object]]:
        from accelerate_cpp import Accelerator, ParallelismConfig
        from accelerate_cpp.state import AcceleratorState, GradientState
        from accelerate_cpp.utils import PipelineParallelConfig

        AcceleratorState._reset_state()
        GradientState._reset_state()
        stages = PipelineParallelConfig(schedule=self._schedule, micro_batches=micro_batches)
        config = ParallelismConfig(pp_size=int(os.environ["WORLD_SIZE"]), pp_handler=stages)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        batch = torch.randn(micro_batches, TOKENS, WIDTH)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return lambda: accelerator.train_batch(batch, square, model=model), step


def worker(schedule: str, steps: int) -> None:
    """One rank of a schedule: answers turns until the parent closes the socket."""
    torch.set_num_threads(1)
    measured = Measured(schedule)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(json.dumps(own_rank()), file=lines, flush=True)
            while line := lines.readline():
                print(json.dumps(measured.turn(int(json.loads(line)), steps)), file=lines, flush=True)
    dist.destroy_process_group()


def compare(turns: int, processes: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Lets the schedules take turns, and returns the medians."""
    from accelerate_cpp.parallel.pipeline.schedules import bubble_fraction, schedule_named

    groups: dict[str, Group] = {}
    rows = []
    try:
        for schedule in SCHEDULES:
            groups[schedule] = Group(sys.argv[0], Contestant(schedule), processes)
        for micro_batches in counts:
            answers: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in SCHEDULES}
            for turn in range(WARM_UP_TURNS + turns):
                for schedule, group in groups.items():
                    answer = group.turn(str(micro_batches))
                    if turn >= WARM_UP_TURNS:
                        answers[schedule].append(answer)
            for schedule, found in answers.items():
                shares = sorted(answer["share"] for answer in found)
                stages = processes * schedule_named(schedule).stages_per_rank
                rows.append(
                    {
                        "schedule": schedule,
                        "micro_batches": micro_batches,
                        "milliseconds": 1e3 * statistics.median(answer["seconds"] for answer in found),
                        "waits": statistics.median(shares),
                        "least": shares[0],
                        "most": shares[-1],
                        "formula": bubble_fraction(schedule, stages, micro_batches),
                    }
                )
        for group in groups.values():
            group.end()
    finally:
        for group in groups.values():
            group.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="how often each schedule is measured")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=list(MICRO_BATCHES), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.steps)
        return
    if arguments.processes < 2 or arguments.turns < 1 or arguments.steps < 1:
        raise SystemExit("--processes must be at least 2, --turns and --steps at least 1")
    rows = compare(arguments.turns, arguments.processes, arguments.micro_batches)
    print(f"\n{arguments.processes} processes\n")
    print("| schedule | micro-batches | batch | waits | least to most | formula |")
    print("|--|--|--|--|--|--|")
    for row in rows:
        print(
            f"| {row['schedule']} | {row['micro_batches']} | {row['milliseconds']:.0f} ms | {100 * row['waits']:.1f} % "
            f"| {100 * row['least']:.1f} to {100 * row['most']:.1f} | {100 * row['formula']:.1f} % |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
