"""What sharded models take in memory: bytes of each process, and what all processes of a host take together.

The model is the transformer of 25 million parameters of ``benchmarks/step.py``, trained by AdamW. "Host after
prepare" is by how much the proportional set sizes of all processes grow with a model that is prepared (what several
processes have in common counts once; in data parallelism, buckets of gradients are there by then). 1 is one model.
"""

from __future__ import annotations

import argparse
import gc
import re
from pathlib import Path
from typing import Any

import torch
from parallel import sharding
from step import transformer

from accelerate_cpp import Accelerator, notebook_launcher
from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.utils import gather_object

WAYS: dict[str, dict[str, Any] | None] = {
    "data parallel": None,
    "FSDP2": {},
    "FSDP2, weights once per host": {"weights_once_per_host": True},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
}


def proportional_bytes() -> int:
    """Of this process: each page counts by how many processes have it."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measure(way: str) -> None:
    """One process: trains two steps; rank 0 prints a row."""
    torch.set_num_threads(1)
    options = WAYS[way]
    accelerator = Accelerator(cpu=True, fsdp_plugin=None if options is None else sharding(**options))
    layer = torch.nn.TransformerEncoderLayer(8, 1, 8)
    accelerator.prepare(torch.nn.TransformerEncoder(layer, 1))  # what is made once, whatever the model
    before = _together(accelerator, proportional_bytes)
    model, batch = transformer()
    whole = sum(weight.nbytes for weight in model.parameters())
    model = accelerator.prepare(model)
    gc.collect()
    weights = (_together(accelerator, proportional_bytes) - before) / whole
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    sizes = {
        "stepped on": [local_part(one) for one in parameters],
        "gradients": [local_part(one.grad) for one in parameters],
        "states": [
            local_part(value)
            for one in parameters
            for value in optimizer.state[one].values()
            if isinstance(value, torch.Tensor) and value.ndim > 0
        ],
    }
    shown = [f"{sum(one.nbytes for one in tensors) / whole:.3f}" for tensors in sizes.values()]
    cells = [way, accelerator.num_processes, *shown, f"{weights:.2f}"]
    accelerator.print(f"| {' | '.join(map(str, cells))} |")


def _together(accelerator: Accelerator, figure: Any) -> int:
    accelerator.wait_for_everyone()
    return sum(gather_object([figure()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    chosen = parser.parse_args()
    print("| way | processes | stepped on | gradients | states | host after prepare |")
    print("|--|--|--|--|--|--|", flush=True)
    for processes in chosen.processes:
        for way in WAYS:
            notebook_launcher(measure, (way,), num_processes=processes)


if __name__ == "__main__":
    main()
