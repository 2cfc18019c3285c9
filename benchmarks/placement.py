"""Models that are larger than a device: device maps, offloading and loading, the original's and ours, in one process.

Layers are linear, without a bias: small ones of 64 x 64, large ones of 1024 x 1024 floats (4 MB). Offloaded passes are
given one row, so that bringing weights, not multiplying by them, takes the time; theirs is the time of one layer. The
bound of these passes is the same model without hooks, and that of a pass whose files are not in memory is reading the
files once. With 256 rows such a pass computes about as long as it reads.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from interleaved import Measurement, command_line, compare, seconds_of_each, serve
from safetensors.torch import save_file
from torch import nn
from workers import Contestant

PACKAGES = {"accelerate 1.15": "accelerate", "accelerate_cpp": "accelerate_cpp"}
BOUND = "no hooks"
READING = "reading the files"
LAYERS, SMALL, LARGE = 32, 64, 1024
PASSES_PER_TURN = 20
COLD_LAYERS, LOADED_LAYERS = 128, 512
BLOCKS = 667
MAP = f"infer_auto_device_map, {3 * BLOCKS + 1} modules"
COLD = {
    f"disk_offload, {COLD_LAYERS * 4} MB, files not in memory, {rows} row{'s'[: rows > 1]}, whole pass": rows
    for rows in (1, 256)
}
LOADED = f"load_checkpoint_and_dispatch, {LOADED_LAYERS * 4 >> 10} GB to the CPU"
TOUCHED = f"{LOADED}, all values read"
OFFLOADED = {
    f"{way}_offload, {kind} layer": (way, width)
    for way in ("cpu", "disk")
    for kind, width in (("small", SMALL), ("4 MB", LARGE))
}
ROW = torch.ones(1, LARGE)


def stack(width: int, layers: int) -> nn.Sequential:
    """Linear layers, whose values do not grow from one to the next."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def nested() -> nn.Module:
    """On the meta device: blocks of three modules."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(BLOCKS)))


def forget(folder: Path) -> None:
    """Drops what the system keeps of the files in ``folder``; what is mapped it keeps."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read(folder: Path) -> None:
    """Reads every file once."""
    buffer = bytearray(4 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


class Calls:
    """What one contestant does in each measurement.

    Args:
        package: of the contestant; ``None`` for the bounds.
        folder: for files.
    """

    def __init__(self, package: str | None, folder: Path) -> None:
        self._module: Any = None if package is None else importlib.import_module(package)
        self._folder = folder
        self._offloaded: dict[str, Callable[[], object]] = {}
        self._maps = nested() if self._module else None

    def seconds(self, measurement: str) -> list[float]:
        """How long each operation of a turn takes."""
        if measurement == MAP:
            # Two accelerators that the model half fills.
            room = {0: 8 << 20, 1: 8 << 20, "cpu": 1 << 30}
            return seconds_of_each(lambda: self._module.infer_auto_device_map(self._maps, room), 3)
        if measurement in COLD:
            return [self._cold_pass(COLD[measurement])]
        if measurement in (LOADED, TOUCHED):
            return [self._load(measurement == TOUCHED)]
        call = self._offloaded.setdefault(measurement, self._passes(*OFFLOADED[measurement]))
        return [each / LAYERS for each in seconds_of_each(call, PASSES_PER_TURN)]

    def _passes(self, way: str, width: int) -> Callable[[], object]:
        model, row = stack(width, LAYERS), ROW[:, :width]
        if self._module and way == "cpu":
            self._module.cpu_offload(model, execution_device="cpu")
        elif self._module:
            self._module.disk_offload(model, self._folder / f"disk_{width}", execution_device="cpu")

        def call() -> object:
            with torch.no_grad():
                return model(row)

        return call

    def _cold_pass(self, rows: int) -> float:
        folder = self._folder / "cold"
        if not folder.exists():
            importlib.import_module("accelerate").utils.offload_state_dict(
                str(folder), stack(LARGE, COLD_LAYERS).state_dict()
            )
        if self._module is None:
            forget(folder)
            return timed(lambda: read(folder))
        with self._module.init_empty_weights():
            model = stack(LARGE, COLD_LAYERS)
        self._module.disk_offload(model, folder, execution_device="cpu")
        gc.collect()  # the model of the turn before, which refers to itself, has the files mapped
        forget(folder)
        with torch.no_grad():
            return timed(lambda: model(ROW.expand(rows, -1)))

    def _load(self, touch: bool) -> float:
        path = self._folder / "model.safetensors"
        if not path.exists():
            save_file(stack(LARGE, LOADED_LAYERS).state_dict(), path)
            read(self._folder)
        with self._module.init_empty_weights():
            model = stack(LARGE, LOADED_LAYERS)

        def load() -> None:
            self._module.load_checkpoint_and_dispatch(model, str(path), device_map={"": "cpu"})
            for parameter in model.parameters() if touch else ():
                parameter.detach().sum()

        return timed(load)


def timed(call: Callable[[], object]) -> float:
    """How many seconds a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def calls(name: str) -> Iterator[Calls]:
    """What the contestant does, with a folder for the time."""
    with tempfile.TemporaryDirectory() as folder:
        yield Calls(PACKAGES.get(name), Path(folder))


def worker(name: str) -> None:
    """The process of a contestant."""
    logging.disable(logging.WARNING)  # of accelerators in a map that are not there
    with calls(name) as own:
        serve(own.seconds)


def measurements(_: int) -> list[Measurement]:
    """What is measured, and against which bound."""
    packages = tuple(PACKAGES)
    alike = [Measurement(name, packages) for name in (MAP, LOADED, TOUCHED)]
    bounded = [Measurement(name, (*packages, BOUND)) for name in OFFLOADED]
    return [*alike, *bounded, *(Measurement(name, (READING, *packages)) for name in COLD)]


if __name__ == "__main__":
    contestants = [Contestant(name) for name in (*PACKAGES, BOUND, READING)]
    parser = command_line(__doc__, contestants)
    parser.set_defaults(processes=[1])
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, measurements)
