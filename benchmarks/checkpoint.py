"""Saving and loading the state of a training run: the original Accelerate, and ours, blocking and in the background.

The model and Adam's two moments for each of its parameters make up --megabytes. "save" is a whole blocking save_state;
"stall" is what a step waits for save_state(blocking=False), with the original's whole save as what it is compared with;
"load" is load_state. Checkpoints are numbered, with total_limit=2, so that each save also removes an old one. Ours
are on the disk when save_state returns; the original's are in the memory of the system.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from interleaved import Measurement, command_line, compare, seconds_of_each, serve
from torch import nn
from workers import Contestant

NAMES = ("accelerate 1.15", "accelerate_cpp")
MEGABYTES_VARIABLE, FOLDER_VARIABLE = "CHECKPOINT_BENCHMARK_MEGABYTES", "CHECKPOINT_BENCHMARK_FOLDER"
MEASUREMENTS = ("save", "stall", "load")
WIDTH = 1024


def prepared(package: str, megabytes: int, folder: str) -> tuple[Any, nn.Module]:
    """An accelerator with a model and Adam, whose state is about ``megabytes``, and which saves below ``folder``."""
    options = {"project_dir": folder, "automatic_checkpoint_naming": True, "total_limit": 2}
    project = importlib.import_module(f"{package}.utils").ProjectConfiguration(**options)
    accelerator = importlib.import_module(package).Accelerator(cpu=True, project_config=project)
    layers = max(1, megabytes * 1_000_000 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model


def worker(name: str) -> None:
    """One rank of a contestant."""
    package = "accelerate" if name == NAMES[0] else "accelerate_cpp"
    folder = str(Path(os.environ[FOLDER_VARIABLE]) / package)
    accelerator, model = prepared(package, int(os.environ[MEGABYTES_VARIABLE]), folder)
    accelerator.save_state()

    def measure(measurement: str) -> list[float]:
        if measurement == "load":
            expected = [parameter.detach().clone() for parameter in model.parameters()]
            seconds = seconds_of_each(accelerator.load_state, 1)
            if not all(torch.equal(own, saved) for own, saved in zip(model.parameters(), expected, strict=True)):
                raise SystemExit(f"{name} did not load what it saved")
            return seconds
        if measurement == "stall" and package == "accelerate_cpp":
            seconds = seconds_of_each(lambda: accelerator.save_state(blocking=False), 1)
            accelerator.wait_for_checkpoint()
            return seconds
        return seconds_of_each(accelerator.save_state, 1)

    serve(measure)
    accelerator.end_training()


def main() -> None:
    contestants = [Contestant(name) for name in NAMES]
    parser = command_line(__doc__, contestants)
    parser.set_defaults(processes=[1])
    parser.add_argument("--megabytes", type=int, default=500, help="of model and optimizer together")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to write to")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    folder = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=arguments.folder)
    os.environ[MEGABYTES_VARIABLE], os.environ[FOLDER_VARIABLE] = str(arguments.megabytes), folder
    try:
        compare(arguments, contestants, lambda _: [Measurement(name, NAMES) for name in MEASUREMENTS])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
