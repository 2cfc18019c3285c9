"""Endless runs of 2 and 4 ranks, and a kernel that starts workers 200 times, one beside the other.

Usage: ``PYTHONPATH=tests/distributed python tests/endurance/run.py [SECONDS]``. Writes ``out/endurance.json`` and
``out/endurance.png``, prints a table, and exits with 1 when a measure grows or steps become slower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import watched
from growth import ends
from measures import COUNTS, PAGES

ROOT = Path(__file__).parents[2]
LAUNCHES = 200
SLOWER = 1.5
"""By what a step may take longer at the end: machines do other things, too."""
_UNITS = {**dict.fromkeys(PAGES, "MiB"), **dict.fromkeys(COUNTS, "")}


def runs(seconds: float, processes: Sequence[int], launches: int) -> list[watched.Run]:
    """All runs, at the same time: each lasts ``seconds`` or, that of the kernel, until it has started so often."""
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(watched.ranks, size, seconds) for size in processes]
        kernel = [pool.submit(watched.kernel, launches)] if launches else []
        return [run.result() for run in [*ranks, *kernel]]


def table(done: Sequence[watched.Run]) -> str:
    """A line for each process and measure: where it began and ended after the warm-up, and whether it grew."""
    lines = []
    for run in done:
        lines.append(f"{run.name}: {run.operations} operations, {run.seconds:.0f} s")
        for series in run.series:
            for one in series.growths():
                verdict = "GROWS" if one.grows else "steady"
                lines.append(f"  {verdict:6} {one} (more than {one.smallest_seen:.3g} each would be noticed)")
    return "\n".join(lines)


def slowing(done: Sequence[watched.Run]) -> list[str]:
    """A line for each process whose steps take longer and longer."""
    lines = []
    for run in done:
        for series in run.series:
            first, last = ends(series.step_seconds)
            if last > SLOWER * first:
                lines.append(
                    f"{run.name}: {series.process}: a step took {1e3 * first:.1f} ms, and {1e3 * last:.1f} ms later"
                )
    return lines


def plot(done: Sequence[watched.Run], file: Path) -> None:
    """A column for each run, a row for each measure and for the time of a step, a line for each process."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [*_UNITS, "step_seconds"]
    figure, axes = pyplot.subplots(
        len(rows), len(done), figsize=(5 * len(done), 2 * len(rows)), squeeze=False, layout="constrained"
    )
    for column, run in enumerate(done):
        for row, name in enumerate(rows):
            place = axes[row][column]
            unit = _UNITS.get(name, "s")
            scale = 1 << 20 if unit == "MiB" else 1
            for series in run.series:
                values = series.measures.get(name, series.step_seconds)
                place.plot(series.operations, [value / scale for value in values], label=series.process, linewidth=1)
            place.set_ylabel(f"{name.removesuffix('_bytes').removesuffix('_seconds')} {unit}".replace("_", " ").strip())
            place.set_ylim(bottom=0)
        axes[0][column].set_title(f"{run.name}: {run.operations} operations, {run.seconds:.0f} s")
        axes[0][column].legend(fontsize=7)
        axes[-1][column].set_xlabel("operations")
    figure.savefig(file, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seconds", nargs="?", type=float, default=3600)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4], help="sizes of the groups")
    parser.add_argument(
        "--launches", type=int, default=LAUNCHES, help="how often the kernel starts workers; 0: no kernel"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "endurance", help="the files, without their endings")
    options = parser.parse_args(arguments)
    done = runs(options.seconds, options.processes, options.launches)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps([run.as_dict() for run in done]))
    plot(done, options.out.with_suffix(".png"))
    print(table(done))
    slower = slowing(done)
    print("\n".join(slower))
    return 1 if slower or any(run.growing() for run in done) else 0


if __name__ == "__main__":
    sys.exit(main())
