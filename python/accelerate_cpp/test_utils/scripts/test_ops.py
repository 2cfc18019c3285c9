"""Whether these processes exchange tensors and objects; ``main`` runs in any number of processes."""

from __future__ import annotations

import torch

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts.required import Check, require, run
from accelerate_cpp.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

ROWS = 3


def _rows_of(accelerator: Accelerator, rank: int, rows: int = ROWS) -> torch.Tensor:
    """Numbers that no other rank has; the first of all is 1."""
    return torch.arange(1, rows + 1, device=accelerator.device, dtype=torch.float32) + ROWS * rank


def gathered_tensors(accelerator: Accelerator) -> None:
    """Every process gets the rows of all, in the order of ranks, also of parts of larger tensors."""
    expected = [float(row) for row in range(1, ROWS * accelerator.num_processes + 1)]
    rows = _rows_of(accelerator, accelerator.process_index)
    require("the rows that gather() collects", expected, gather(rows).tolist())
    every_other = rows.repeat_interleave(2)[::2]
    require("the rows that gather() collects of a strided tensor", expected, gather({"x": every_other})["x"].tolist())


def gathered_objects(accelerator: Accelerator) -> None:
    """Every process gets the items of all."""
    found = gather_object([f"item of {accelerator.process_index}"])
    require("the items of gather_object()", [f"item of {rank}" for rank in range(accelerator.num_processes)], found)


def sent_by_one(accelerator: Accelerator) -> None:
    """Every process gets what one has."""
    last = accelerator.num_processes - 1
    found = broadcast(_rows_of(accelerator, accelerator.process_index), from_process=last)
    require("the rows that broadcast() sends", _rows_of(accelerator, last).tolist(), found.tolist())
    objects = broadcast_object_list([accelerator.process_index, "text"])
    require("the items of broadcast_object_list()", [0, "text"], list(objects))


def padded(accelerator: Accelerator) -> None:
    """Tensors of different lengths become equally long, filled up behind or in front."""
    rank, longest = accelerator.process_index, accelerator.num_processes
    rows = _rows_of(accelerator, 0, rows=rank + 1)
    behind, before = pad_across_processes(rows), pad_across_processes(rows, pad_first=True)
    filling = [0.0] * (longest - rank - 1)
    require("rows padded behind", rows.tolist() + filling, behind.tolist())
    require("rows padded in front", filling + rows.tolist(), before.tolist())


def reduced(accelerator: Accelerator) -> None:
    """Every process gets the sum and the mean over all."""
    ranks = range(accelerator.num_processes)
    total = sum(_rows_of(accelerator, rank) for rank in ranks)
    rows = _rows_of(accelerator, accelerator.process_index)
    assert isinstance(total, torch.Tensor)
    require("the sum of reduce()", total.tolist(), reduce(rows, "sum").tolist())
    require("the mean of reduce()", (total / len(ranks)).tolist(), reduce(rows, "mean").tolist())


CHECKS: tuple[Check, ...] = (gathered_tensors, gathered_objects, sent_by_one, padded, reduced)


def main() -> None:
    """Runs all checks on every process; the main process names each that has passed."""
    run(Accelerator(), CHECKS)


if __name__ == "__main__":
    main()
