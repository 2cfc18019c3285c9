"""Collectives among the processes of one host: shm against Gloo, Open MPI and the speed of a copy in memory.

  gloo, shm              through torch.distributed, the Python call included
  shm in arena           the same, on tensors in shared memory
  shm directly           Communicator.all_reduce, as Open MPI's without what torch.distributed does around it
  shm directly in arena  the same, on tensors in shared memory
  Open MPI               through mpi4py; needs mpirun and `pip install mpi4py`
  memcpy                 every process copies the tensor once, at the same time; only where every process has a core of
                         its own

A size is that of the larger operand. bf16 is measured at the same sizes in bytes. "call" is an all_reduce in a group of
one: what the call costs before any rank is waited for. Each collective is checked for its result before it is timed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engines import Array, CopyEngine, DirectEngine, Engine, MpiEngine, Run, TorchEngine
from interleaved import Measurement, command_line, compare, serve
from workers import Contestant, own_rank

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
MANY_PROCESSES_SIZES = ("4 KB", "1 MB", "25 MB")
ITEM_BYTES = {"fp32": 4, "bf16": 2}
IN_PLACE = ("all_reduce", "broadcast", "call")
GLOO, MPI, MEMCPY = "gloo", "Open MPI", "memcpy"
SHM, ARENA, DIRECT, DIRECT_ARENA = "shm", "shm in arena", "shm directly", "shm directly in arena"
DIRECTLY = (DIRECT, DIRECT_ARENA)
CONTESTANTS = [Contestant(GLOO), Contestant(MPI, "mpirun"), *map(Contestant, (SHM, ARENA, *DIRECTLY, MEMCPY))]
TURN_BYTES = 64 << 20
TURN_OPERATIONS = 400
"""Of all ranks together, since that is what a turn costs where they share cores."""
OPERATIONS_BETWEEN_REFILLS = 16
"""In so many, eight ranks multiply what they sum by 8 ** 16, which fp32 and bf16 hold."""


@dataclasses.dataclass(frozen=True)
class Case(Measurement):
    """A collective on operands of one type and size."""

    operation: str
    dtype: str
    size_bytes: int


def cases(processes: int) -> list[Case]:
    """What is measured with so many processes: everything with two, all_reduce beyond."""

    def case(operation: str, dtype: str, size: str, *absent: str) -> Case:
        without = {*absent, *([] if processes <= (os.cpu_count() or 1) else [MEMCPY])}
        names = tuple(one.name for one in CONTESTANTS if one.name not in without)
        return Case(f"{operation} {dtype} {size}", names, operation, dtype, SIZES[size])

    if processes != 2:
        return [case("all_reduce", "fp32", size, *DIRECTLY) for size in MANY_PROCESSES_SIZES]
    return [
        *(case("all_reduce", "fp32", size) for size in SIZES),
        *(case("all_reduce", "bf16", size, MPI, *DIRECTLY) for size in SIZES),
        *(case(operation, "fp32", "25 MB", *DIRECTLY) for operation in ("reduce_scatter", "all_gather", "broadcast")),
        case("call", "fp32", "4 KB", ARENA, *DIRECTLY, MEMCPY),
    ]


def pattern(count: int, rank: int) -> Array:
    """What a rank contributes to the check: differs along the tensor and between ranks, and has exact sums in bf16."""
    return (np.arange(count) % 7 + rank).astype(np.float32)


def expected(operation: str, count: int, rank: int, size: int) -> Array:
    """The result on ``rank`` when all contribute their patterns; ``count`` is that of the larger operand."""
    share = count // size
    if operation in ("copy", "call"):
        return pattern(count, rank)
    if operation == "broadcast":
        return pattern(count, size - 1)
    if operation == "all_gather":
        return np.concatenate([pattern(share, peer) for peer in range(size)])
    total: Array = sum((pattern(count, peer) for peer in range(size)), np.zeros(count, np.float32))
    return total[rank * share : (rank + 1) * share] if operation == "reduce_scatter" else total


def check(engine: Engine, case: Case, run: Run, given: Any, result: Any) -> None:
    """Runs the operation once; raises ``SystemExit`` when its result is wrong."""
    engine.write(result, np.full(1, 99, np.float32))
    engine.write(given, pattern(_given_count(case, engine.size), engine.rank))
    run()
    found, wanted = engine.read(result), expected(case.operation, _count(case), engine.rank, engine.size)
    wrong = np.flatnonzero(found != wanted)
    if wrong.size > 0:
        first = int(wrong[0])
        raise SystemExit(
            f"rank {engine.rank}: {case.name} has {wrong.size:,} wrong elements of {wanted.size:,}: element {first} is "
            f"{found[first]}, not {wanted[first]}"
        )


def _count(case: Case) -> int:
    """Elements of the larger operand."""
    return case.size_bytes // ITEM_BYTES[case.dtype]


def _given_count(case: Case, size: int) -> int:
    return _count(case) // size if case.operation == "all_gather" else _count(case)


def _result_count(case: Case, size: int) -> int:
    return _count(case) // size if case.operation == "reduce_scatter" else _count(case)


class Timer:
    """Times the cases of one engine; holds the operands of the case that came last."""

    def __init__(self, engine: Engine, operation_of: Callable[[Case], str]) -> None:
        self._engine, self._operation_of = engine, operation_of
        self._cases = {case.name: case for case in cases(engine.size)}
        self._prepared: tuple[str, Run, Run] | None = None

    def turn(self, name: str) -> list[float]:
        """Seconds of each of as many operations as fit into a turn."""
        if self._prepared is None or self._prepared[0] != name:
            self._prepared = None
            self._prepared = (name, *self._prepare(self._cases[name]))
        _, run, refill = self._prepared
        count = max(8, min(TURN_OPERATIONS // self._engine.size, TURN_BYTES // self._cases[name].size_bytes))
        refill()
        for _ in range(1 + count // 10):
            run()
        seconds = []
        for done in range(count):
            if done % OPERATIONS_BETWEEN_REFILLS == 0:
                refill()
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return seconds

    def _prepare(self, case: Case) -> tuple[Run, Run]:
        """The operation, checked, and what makes its operand anew and has all ranks meet."""
        engine = self._engine
        case = dataclasses.replace(case, operation=self._operation_of(case))
        in_place = case.operation in IN_PLACE
        given = engine.empty(_given_count(case, engine.size), case.dtype)
        result = given if in_place else engine.empty(_result_count(case, engine.size), case.dtype)
        run = engine.operation(case.operation, given, result)
        check(engine, case, run, given, result)
        one = np.ones(1, np.float32)

        def refill() -> None:
            if in_place:
                engine.write(given, one)
            engine.meet()

        return run, refill


def worker(name: str) -> None:
    """One rank of a contestant."""
    engines: dict[str, Callable[[], Engine]] = {
        GLOO: lambda: TorchEngine("gloo"),
        MPI: MpiEngine,
        SHM: lambda: TorchEngine("shm"),
        ARENA: lambda: TorchEngine("shm", in_arena=True),
        DIRECT: DirectEngine,
        DIRECT_ARENA: lambda: DirectEngine(in_arena=True),
        MEMCPY: lambda: CopyEngine(own_rank(), int(os.environ["WORLD_SIZE"])),
    }
    engine = engines[name]()
    serve(Timer(engine, lambda case: "copy" if name == MEMCPY else case.operation).turn)
    engine.leave()


def main() -> None:
    parser = command_line(__doc__, CONTESTANTS)
    parser.set_defaults(processes=[2, 4, 8])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the fractions into this PNG file")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    document = compare(arguments, CONTESTANTS, cases, least_processes=2)
    if arguments.plot:
        from plots import plot

        plot(document, arguments.plot)
        print(f"\nplot: {arguments.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
