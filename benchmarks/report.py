"""What a benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interleaved import Result
    from workers import Contestant

PEERS = ("torch", "mpi4py", "accelerate")


def print_heading(processes: int, absent: Sequence[Contestant], times: str = "those of rank 0") -> None:
    """The head of a table, and a line for each contestant that cannot take part."""
    print(f"\n{processes} processes; times are {times}\n")
    for contestant in absent:
        print(f"{contestant.name}: {contestant.absent}\n")
    print("| measurement | contestant | time | mean | fraction of the first | quartiles |")
    print("|--|--|--|--|--|--|", flush=True)


def print_results(results: list[Result]) -> list[Result]:
    """The rows of one measurement; returns ``results``."""
    for result in results:
        low, high = result.quartiles
        print(
            f"| {result.measurement.name} | {result.contestant} | {duration(result.median_us)} "
            f"| {duration(result.mean_us)} | {result.fraction:.3f} | {low:.3f} to {high:.3f} |",
            flush=True,
        )
    return results


def duration(microseconds: float) -> str:
    """Three digits at least: ``4.52 µs``, ``119 µs``, ``2,571 µs``, ``20.8 ms``."""
    if microseconds >= 10_000:
        return f"{microseconds / 1000:,.1f} ms"
    return f"{microseconds:,.{0 if microseconds >= 100 else 1 if microseconds >= 10 else 2}f} µs"


def as_document(results: Sequence[Result]) -> dict[str, Any]:
    """``{"machine": …, "results": [one object per contestant and measurement]}``."""
    return {"machine": _machine(), "results": [dataclasses.asdict(result) for result in results]}


def write_json(document: dict[str, Any], target: Path) -> None:
    """Writes what :func:`as_document` returned."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _machine() -> dict[str, str | int]:
    """What a reader must know of the machine to make use of a figure."""
    versions = {}
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "system": platform.platform(),
        **versions,
    }
