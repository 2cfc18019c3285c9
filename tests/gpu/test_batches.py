"""Batches on a stream of their own: what arrives, and that it arrives while the GPU computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.devices.transfer import CopyStream


def test_batches_that_are_copied_ahead_are_those_of_the_loader() -> None:
    rows = torch.randn(64, 4096)
    source = DataLoader(TensorDataset(rows, torch.arange(64)), batch_size=6, pin_memory=True)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    loader = accelerator.prepare(source)
    weight = torch.randn(4096, 4096, device="cuda")
    sums, seen = [], []
    for batch, numbers in loader:
        assert batch.device == accelerator.device
        # Longer than the copy of the next batch, and memory of earlier ones is free again: what overwrote a batch
        # before it was read would show.
        busy = batch @ weight
        for _ in range(8):
            busy = busy @ weight
        sums.append(batch.double().sum(dim=1) + 0 * busy.sum(dim=1).nan_to_num(posinf=0, neginf=0))
        seen.append(numbers)
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(64))
    torch.testing.assert_close(torch.cat(sums).cpu(), rows.double().sum(dim=1), rtol=1e-12, atol=1e-9)


def test_a_batch_arrives_while_the_device_is_not_done_with_what_it_computes(
    gate: Any, happens: Callable[[torch.cuda.Event], bool]
) -> None:
    device = torch.device("cuda", 0)
    copies, pinned = CopyStream(device), torch.arange(1000.0).pin_memory()
    copies.end(copies.begin(pinned))  # what the first copy has to prepare
    current = torch.cuda.current_stream()
    gate.close(current)
    computed = current.record_event()
    copying = copies.begin({"batch": pinned})
    assert happens(copying.arrived), "the copy waits for the computation"
    assert not computed.query()
    batch = copies.end(copying)["batch"]
    total = batch.sum()
    gate.open()
    assert total.item() == 499500.0


def test_what_is_computed_waits_for_the_copy(gate: Any, happens: Callable[[torch.cuda.Event], bool]) -> None:
    device = torch.device("cuda", 0)
    copies, pinned = CopyStream(device), torch.arange(1000.0).pin_memory()
    copies.end(copies.begin(pinned))
    gate.close(copies._stream)
    batch = copies.end(copies.begin(pinned))
    doubled = batch * 2
    computed = torch.cuda.current_stream().record_event()
    assert not computed.query()
    gate.open()
    assert happens(computed)
    assert torch.equal(doubled.cpu(), torch.arange(1000.0) * 2)
