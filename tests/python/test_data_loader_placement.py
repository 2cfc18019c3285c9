"""When prepared loaders copy their batches to the device."""

from __future__ import annotations

import torch

from accelerate_cpp import data_loader
from accelerate_cpp.devices import device


def test_pinned_batches_are_copied_one_ahead_to_a_gpu_that_does_not_block(monkeypatch):
    told = []

    class Copies:
        def __init__(self, device, _module):
            told.append(str(device))

        def begin(self, batch):
            told.append(f"begin {batch.tolist()}")
            return batch

        def end(self, batch):
            told.append(f"end {batch.tolist()}")
            return batch

    monkeypatch.setattr(device, "CopyStream", Copies)
    for options in ({"_non_blocking": True}, {"pin_memory": True}, {"_non_blocking": True, "pin_memory": True}):
        loader = data_loader.DataLoaderShard([0, 1, 2], torch.device("cuda", 1), batch_size=1, **options)
        monkeypatch.setattr(loader, "_place", lambda batch: batch)
        monkeypatch.setattr(
            loader.base_dataloader, "_get_iterator", lambda: iter([torch.tensor([i]) for i in range(3)])
        )
        assert [batch.tolist() for batch in loader] == [[0], [1], [2]]
    assert told == ["cuda:1", "begin [0]", "begin [1]", "end [0]", "begin [2]", "end [1]", "end [2]"]
