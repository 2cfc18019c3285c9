"""What was prepared is gone when it is freed: again and again, the memory of the process stays as it was."""

from __future__ import annotations

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

ROUNDS = 100
MODEL_BYTES = 4 * 1024 * 1024


def prepares_trains_and_frees(uses_clear: bool) -> tuple[list[bool], int]:
    """Whether everything prepared is dead after a round; and how much the process has grown since the tenth."""
    import weakref
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    free = accelerator.clear if uses_clear else accelerator.free_memory
    alive: list[bool] = []
    stable = 0
    for round_ in range(ROUNDS):
        plain = nn.Linear(1024, 1024)
        optimizer = torch.optim.AdamW(plain.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(list(torch.ones(8, 1024)), batch_size=2)
        objects = [plain, optimizer, schedule, loader]
        prepared = list(accelerator.prepare(*objects))
        for batch in prepared[3]:
            with accelerator.accumulate(prepared[0]):
                accelerator.backward(prepared[0](batch).sum())
                accelerator.clip_grad_norm_(prepared[0].parameters(), 1.0)
                prepared[1].step()
                prepared[2].step()
                prepared[1].zero_grad()
        references = [weakref.ref(one) for one in [*objects, *prepared, plain.weight]]
        del plain, optimizer, schedule, loader, batch
        objects.clear()
        freed = free(*[prepared.pop() for _ in range(4)])
        assert freed == [None] * 4
        alive += [reference() is not None for reference in references]
        if round_ == 9:
            stable = resident_bytes()
    return alive, resident_bytes() - stable


@pytest.mark.parametrize(("world_size", "uses_clear"), [(1, True), (2, False)], ids=["clear", "free_memory"])
@pytest.mark.long
def test_rounds_of_training_leave_nothing_behind(world_size: int, uses_clear: bool) -> None:
    for alive, grown_bytes in run_processes(prepares_trains_and_frees, world_size, uses_clear, timeout=300):
        assert not any(alive)
        # 90 rounds of a model, gradients and two moments take eleven times as much; the allocator's own play is 30 MB.
        assert grown_bytes < 32 * MODEL_BYTES
