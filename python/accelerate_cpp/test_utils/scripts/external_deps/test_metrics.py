"""Whether metrics over several processes are those of one; ``main`` runs in any number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.test_utils.scripts.required import require

# Numbers of samples that no number of processes divides, and that it does.
SAMPLES, BATCH_SIZE = (82, 96, 3), 16


def evaluated(accelerator: Accelerator, samples: int) -> None:
    """Every sample counts once, whether batches are split or dispatched or neither; also as objects."""
    loader: Any = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=BATCH_SIZE))  # type: ignore[arg-type]
    labels, objects = [], []
    for batch in loader:
        labels += accelerator.gather_for_metrics((batch % 2, batch))[1].tolist()
        objects += accelerator.gather_for_metrics([int(sample) for sample in batch.tolist()], use_gather_object=True)
    how = f"of {samples}, {accelerator.dataloader_config}"
    require(f"the samples that gather_for_metrics() collects {how}", list(range(samples)), labels)
    require(f"the objects that gather_for_metrics() collects {how}", list(range(samples)), objects)


def main() -> None:
    """Checks all kinds of loaders on every process; the main process names each that has passed."""
    for split_batches, dispatch_batches in ((False, False), (False, True), (True, False), (True, True)):
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=dispatch_batches)
        )
        for samples in SAMPLES:
            evaluated(accelerator, samples)
            accelerator.print(
                f"split_batches={split_batches}, dispatch_batches={dispatch_batches}, {samples} samples: passed on "
                f"{accelerator.num_processes} process(es)"
            )


if __name__ == "__main__":
    main()
