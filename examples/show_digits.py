"""Shows what digits.py wrote: a table, the curves as a picture, and a comparison with the time of another run."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Run = dict[str, Any]


def table(run: Run) -> str:
    """One row per epoch: test loss, test accuracy and training throughput."""
    rows = [f"{'epoch':>5}  {'loss':>7}  {'accuracy':>8}  {'samples/s':>9}"]
    rows += [
        f"{row['epoch']:>5}  {row['loss']:>7.4f}  {row['accuracy']:>8.4f}  {row['samples_per_second']:>9,.0f}"
        for row in run["epochs"]
    ]
    return "\n".join(rows)


def training_seconds(run: Run) -> float:
    """Seconds spent in the training loops of all epochs, without evaluation and start-up."""
    return sum(row["seconds"] for row in run["epochs"])


def describe(run: Run) -> str:
    """``2 processes``, ``1 process``."""
    return f"{run['processes']} process{'es' if run['processes'] != 1 else ''}"


def plot(run: Run, target: Path) -> None:
    """Writes the curves of test loss and test accuracy to ``target`` (PNG)."""
    epochs = [row["epoch"] for row in run["epochs"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(epochs, [row["loss"] for row in run["epochs"]], color="tab:blue", marker="o", markersize=3)
    left.set(xlabel="epoch", ylabel="test loss", yscale="log")
    right.plot(epochs, [row["accuracy"] for row in run["epochs"]], color="tab:green", marker="o", markersize=3)
    right.set(xlabel="epoch", ylabel="test accuracy", ylim=(None, 1))
    figure.suptitle(f"1,797 handwritten digits, {describe(run)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="what digits.py --metrics wrote")
    parser.add_argument("--beside", type=Path, help="the same of another run, to compare the training time with")
    parser.add_argument("--plot", type=Path, help="PNG file for the curves")
    args = parser.parse_args()
    run = json.loads(args.run.read_text())
    print(table(run))
    print()
    for shown in [run, *([json.loads(args.beside.read_text())] if args.beside else [])]:
        print(f"{describe(shown) + ':':<14}{training_seconds(shown):6.2f} s of training")
    if args.plot:
        plot(run, args.plot)
        print(f"curves: {args.plot}")
    print(f"test accuracy: {run['epochs'][-1]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
