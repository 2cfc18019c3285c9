"""Trains digits.py on one process, on several, and on several with the original accelerate, and shows them together."""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TORCHRUN = "torch.distributed.run"
SCRIPT, FOLDER = Path(__file__).with_name("digits.py"), Path("out/demo")
COLORS = ("#8a95a1", "#1f6fd6", "#e07b00")
# Equal curves cover each other: the first is the widest, and the last has marks alone.
LINES: tuple[dict[str, Any], ...] = (
    {"linewidth": 7, "alpha": 0.6},
    {"linewidth": 2},
    {"linestyle": "none", "marker": "x", "markersize": 7, "markeredgewidth": 1.8},
)
Run = dict[str, Any]


def contestants(processes: int, threads: int) -> dict[str, list[str]]:
    """The name and the command of each run; all processes have ``threads`` threads."""
    launch = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes"]
    each = f"× {threads} thread{'s' if threads > 1 else ''}"
    found = {
        f"accelerate-cpp, 1 process {each}": [*launch, "1", str(SCRIPT)],
        f"accelerate-cpp, {processes} processes {each}": [*launch, str(processes), str(SCRIPT)],
    }
    try:
        version = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        print("Hugging Face Accelerate is not installed, so it is not compared: pip install accelerate==1.15.0")
        return found
    copy = FOLDER / "digits_with_the_original.py"  # the same script, but for its import
    copy.write_text(SCRIPT.read_text().replace("from accelerate_cpp import", "from accelerate import"))
    torchrun = [sys.executable, "-m", TORCHRUN, "--nproc-per-node"]  # its launcher starts one on the CPU
    found[f"accelerate {version}, {processes} processes {each}"] = [*torchrun, str(processes), str(copy)]
    return found


def train(command: list[str], threads: int) -> Run:
    """What one training wrote, with ``threads`` threads in each process.

    The original is run again if it fails: torch's Gloo now and then aborts one of its processes at the end.
    """
    metrics = FOLDER / "metrics.json"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}
    for tries_left in range(2 if TORCHRUN in command else 0, -1, -1):
        done = subprocess.run([*command, "--metrics", str(metrics)], env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            break
        if tries_left == 0:
            sys.exit(f"{done.stdout}{done.stderr}{' '.join(command)} failed with status {done.returncode}")
        print(f"the original failed with status {done.returncode}, and is run again", flush=True)
    run = dict(json.loads(metrics.read_text()))
    assert run["threads"] == threads, f"torch used {run['threads']} threads"
    return run


def step_milliseconds(runs: list[Run]) -> float:
    """The median over all epochs of the mean time of a training step."""
    return statistics.median(1000 * row["seconds"] / row["steps"] for run in runs for row in run["epochs"])


def table(results: dict[str, list[Run]]) -> str:
    """A row for each contestant: step time, and test loss and accuracy after the last epoch."""
    width = max(map(len, results))
    rows = [f"{'':<{width}}  {'step':>8}  {'test loss':>9}  {'accuracy':>8}"]
    for name, runs in results.items():
        last, time = runs[0]["epochs"][-1], f"{step_milliseconds(runs):.2f} ms"
        rows.append(f"{name:<{width}}  {time:>8}  {last['loss']:>9.4f}  {last['accuracy']:>8.4f}")
    return "\n".join(rows)


def plot(results: dict[str, list[Run]], target: Path) -> None:
    """Writes the test losses and the step times to ``target`` (PNG)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.1), layout="constrained", width_ratios=(1, 1.25))
    for color, style, (name, runs) in zip(COLORS, LINES, results.items(), strict=False):
        losses = [row["loss"] for row in runs[0]["epochs"]]
        left.plot(range(1, len(losses) + 1), losses, label=name.partition(" ×")[0], color=color, **style)
    left.set(xlabel="epoch", yscale="log", title="test loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize=9)
    times = [step_milliseconds(runs) for runs in results.values()]
    labels = [name.replace(", ", "\n") for name in results]
    bars = right.barh(labels, times, color=COLORS[: len(times)], height=0.62)
    right.bar_label(bars, [f"{time:.1f} ms" for time in times], padding=4)
    right.invert_yaxis()
    right.set(xlabel="milliseconds", xlim=(0, 1.22 * max(times)), title="time of a training step")
    for axes in (left, right):
        axes.title.set_fontsize(10.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("The same script on 1,797 handwritten digits, with 64 samples per step", fontsize=11)
    figure.savefig(target, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is trained; they take turns")
    parser.add_argument("--plot", type=Path, help="PNG file for the picture")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    trained, results = contestants(args.processes, args.threads), dict[str, list[Run]]()
    for number in range(1, args.rounds + 1):
        for name, command in trained.items():
            run = train(command, args.threads)
            results.setdefault(name, []).append(run)
            print(f"round {number}: {name}: {step_milliseconds([run]):.2f} ms per step", flush=True)
    print(f"\n{table(results)}")
    if args.plot:
        plot(results, args.plot)
        print(f"\npicture: {args.plot}")


if __name__ == "__main__":
    main()
