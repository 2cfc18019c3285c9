"""Whether gradients are synchronised when they are to be; ``main`` runs in any number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts.required import Check, require, run

STEPS, BATCH_SIZE, BATCHES = 2, 4, 5


def _model(accelerator: Accelerator) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    return accelerator.prepare(model)


def _gradient(model: Any) -> float:
    (parameter,) = model.parameters()
    return float(parameter.grad.item())


def _backward(accelerator: Accelerator, model: Any) -> None:
    """The gradient of this pass is the rank, counted from 1."""
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0, device=accelerator.device)).sum())


def _mean_of_ranks(accelerator: Accelerator) -> float:
    return (accelerator.num_processes + 1) / 2


def without_synchronising(accelerator: Accelerator) -> None:
    """Within ``no_sync`` gradients are those of this process; the next pass averages what has added up."""
    model = _model(accelerator)
    with accelerator.no_sync(model):
        _backward(accelerator, model)
    require("the gradient in no_sync()", float(accelerator.process_index + 1), _gradient(model))
    _backward(accelerator, model)
    require("the gradient of two passes, then averaged", 2 * _mean_of_ranks(accelerator), _gradient(model))


def accumulating(accelerator: Accelerator) -> None:
    """Optimizers step every other batch and in the last one, by averages over the processes."""
    accelerator.gradient_accumulation_steps = STEPS
    model = _model(accelerator)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    samples = torch.arange(BATCHES * BATCH_SIZE * accelerator.num_processes)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(samples, batch_size=BATCH_SIZE))  # type: ignore[arg-type]
    synchronised = []
    for number, _ in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            _backward(accelerator, model)
            synchronised.append(accelerator.sync_gradients)
            require(f"sync_gradients in batch {number}", number % STEPS == 0 or number == BATCHES, synchronised[-1])
            optimizer.step()
            optimizer.zero_grad()
    (weight,) = model.parameters()
    expected = 0.5 - _mean_of_ranks(accelerator) * BATCHES / STEPS
    require("the weight after all batches", expected, round(weight.item(), 4))
    accelerator.gradient_accumulation_steps = 1


CHECKS: tuple[Check, ...] = (without_synchronising, accumulating)


def main() -> None:
    """Runs all checks on every process; the main process names each that has passed."""
    run(Accelerator(), CHECKS)


if __name__ == "__main__":
    main()
