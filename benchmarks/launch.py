"""How long a launch of two processes takes until the last of them runs the first line of the user's script.

Each turn of a contestant is a launch of its own. The original starts one process on the CPU, whatever it is asked for;
torchrun starts two. ``python`` runs the script by itself, in one process; "two at once" is what two such processes that
a shell starts take, which no launcher can be faster than.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interleaved import Measurement, Result, command_line
from report import as_document, print_heading, print_results, write_json
from workers import Contestant

# The clock is the same in all processes of a machine.
SCRIPTS = {
    "first line of a script": "import os, time; now = time.monotonic_ns()\n",
    "first line after `import torch`": "import torch\nimport os, time; now = time.monotonic_ns()\n",
}
LEAVES_ITS_TIME = "open(f\"time-{os.environ.get('RANK', '0')}\", 'w').write(str(now))\n"
COMMANDS = {
    "accelerate 1.15": (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
    "python": (sys.executable,),
    "python, two at once": (
        "sh",
        "-c",
        f"RANK=1 {shlex.quote(sys.executable)} $0 & RANK=0 {shlex.quote(sys.executable)} $0; wait",
    ),
    "accelerate_cpp": (sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"),
}


def _environment() -> dict[str, str]:
    """Compiled modules are kept, as where packages are installed: the turn that does not count compiles them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def microseconds_until_first_line(name: str, folder: Path) -> float:
    """Of the process that comes last."""
    began = time.monotonic_ns()
    subprocess.run(
        [*COMMANDS[name], "script.py"],
        cwd=folder,
        env=_environment(),
        check=True,
        capture_output=True,
    )
    times = list(folder.glob("time-*"))
    last = max(int(file.read_text()) for file in times)
    for file in times:
        file.unlink()
    return (last - began) / 1e3


def measure(measurement: Measurement, turns: int) -> list[Result]:
    """All contestants in turns, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in measurement.contestants}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPTS[measurement.name] + LEAVES_ITS_TIME)
        for turn in range(turns + 1):
            for name in measurement.contestants:
                microseconds = microseconds_until_first_line(name, Path(folder))
                if turn > 0:
                    times[name].append(microseconds)
    first = times[measurement.contestants[0]]
    results = []
    for name, own in times.items():
        fractions = sorted(one / other for one, other in zip(own, first, strict=True))
        low, middle, high = statistics.quantiles(fractions, n=4, method="inclusive") if turns > 1 else fractions * 3
        spread = (low, high)
        results.append(Result(measurement, 2, name, statistics.median(own), statistics.fmean(own), middle, spread, own))
    return results


def main() -> None:
    """Measures and prints a table for each of :data:`SCRIPTS`."""
    arguments = command_line(__doc__, [Contestant(name) for name in COMMANDS]).parse_args()
    print_heading(2, [], times="those of the process that comes last")
    results = []
    for name in SCRIPTS:
        results += print_results(measure(Measurement(name, tuple(arguments.contestants)), arguments.turns))
    if arguments.json:
        write_json(as_document(results), arguments.json)


if __name__ == "__main__":
    main()
