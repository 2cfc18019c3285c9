"""What ``accelerate-cpp test`` launches: whether these processes communicate, share data and train as one would.

Each check raises on the rank that finds something wrong, with what it expected and found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts.required import Check, require, run
from accelerate_cpp.utils import set_seed

SAMPLES, BATCH_SIZE, FEATURES, STEPS, EPOCHS = 97, 8, 4, 12, 2


def communication(accelerator: Accelerator) -> None:
    """Every process hears of every other."""
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    require("the ranks that gather() collects", list(range(accelerator.num_processes)), ranks.tolist())
    summed = accelerator.reduce(torch.ones(3, device=accelerator.device), reduction="sum")
    require("the sum of a one from each process", [float(accelerator.num_processes)] * 3, summed.tolist())


def data(accelerator: Accelerator) -> None:
    """Every sample is seen once, in order and shuffled."""
    for shuffle in (False, True):
        loader = accelerator.prepare(DataLoader(torch.arange(SAMPLES), batch_size=BATCH_SIZE, shuffle=shuffle))  # type: ignore[arg-type]
        seen = [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()]
        require(f"the samples seen with shuffle={shuffle}", list(range(SAMPLES)), sorted(seen))


def training(accelerator: Accelerator) -> None:
    """Several processes end with the weights with which one would end."""
    processes = accelerator.num_processes
    found, expected = _trained(processes, accelerator), _trained(processes, None)
    error = float((found - expected).abs().max())
    # In half precision the two round differently.
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 5e-2
    if not error <= tolerance:
        raise RuntimeError(
            f"the weights after {EPOCHS} epochs differ by {error:.2g} from those of one process; expected at most "
            f"{tolerance:.0e}"
        )


def _trained(processes: int, accelerator: Accelerator | None) -> torch.Tensor:
    """The weights of a linear regression on batches that ``processes`` share; without ``accelerator`` one has all."""
    set_seed(42)
    inputs = torch.randn(STEPS * BATCH_SIZE * processes, FEATURES)
    targets = inputs.sum(dim=1, keepdim=True)
    model: Any = torch.nn.Linear(FEATURES, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    size = BATCH_SIZE if accelerator is not None else BATCH_SIZE * processes
    loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=size)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    backward = torch.Tensor.backward if accelerator is None else accelerator.backward
    for _ in range(EPOCHS):
        for batch, target in loader:
            optimizer.zero_grad()
            backward((model(batch) - target).square().mean())
            optimizer.step()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


CHECKS: tuple[Check, ...] = (communication, data, training)


def main() -> None:
    """Runs all checks on every process; the main process names each that has passed."""
    run(Accelerator(), CHECKS)


if __name__ == "__main__":
    main()
