"""One rank of an endless run: rounds of all that a training program does, and a moment to be measured after each.

Usage: ``accelerate-cpp launch ranks.py FOLDER SEED LEAK``. ``LEAK`` is what is lost on purpose: ``descriptors`` (one in
100 operations), ``memory`` (4 KiB a step) or ``nothing``.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, shared_empty
from accelerate_cpp.state import AcceleratorState, GradientState
from accelerate_cpp.utils import (
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from quiet import stand_still

WIDTH, BATCH, BATCHES = 32, 4, 32  # batches of each rank in an epoch
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"mixed_precision": "bf16"},
    {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]},
    {"fsdp": {"zero_stage": 2}},
    {"fsdp": {}},
)
"""How the model is trained, in turn: arguments of ``Accelerator``, and of the plugin that shards it."""


class Done:
    """What this rank has done: steps, operations, and how long steps took; loses things if it is told to."""

    def __init__(self, leak: str) -> None:
        self.steps = self.operations = 0
        self.step_seconds: list[float] = []
        self._leak, self._lost = leak, []

    def operation(self, count: int = 1) -> None:
        for _ in range(count):
            self.operations += 1
            if self._leak == "descriptors" and self.operations % 100 == 0:
                os.open(os.devnull, os.O_RDONLY)

    def step(self, seconds: float) -> None:
        self.operation()
        self.steps += 1
        self.step_seconds.append(seconds)
        if self._leak == "memory":
            self._lost.append(bytes(os.urandom(1)) * 4096)

    def typical_step_seconds(self) -> float:
        """The median of the steps since the last call."""
        typical = median(self.step_seconds)
        self.step_seconds.clear()
        return typical


def new_accelerator(folder: Path, kind: dict[str, Any], round_: int) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    options = dict(kind)
    if (sharding := options.pop("fsdp", None)) is not None:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **sharding)
    project = ProjectConfiguration(
        project_dir=str(folder / "project"), automatic_checkpoint_naming=True, total_limit=2, iteration=3 * round_
    )
    return Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project, **options)


def rows(run: Accelerator) -> int:
    """Of the data; the last batch lacks some."""
    return BATCHES * BATCH * run.num_processes - 3


def model_of(seed: int) -> torch.nn.Module:
    set_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH, WIDTH))


def train_and_evaluate(run: Accelerator, prepared: Any, done: Done, epochs: int) -> None:
    """Epochs over the loaders, with accumulation, clipping, a schedule and an evaluation after each."""
    model, optimizer, schedule, loader, evaluation = prepared
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            begin = time.perf_counter()
            with run.accumulate(model):
                run.backward(torch.nn.functional.mse_loss(model(inputs).float(), targets))
                if run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done.step(time.perf_counter() - begin)
        model.eval()
        with torch.no_grad():
            seen = [run.gather_for_metrics(model(inputs)).shape[0] for inputs, _ in evaluation]
        done.operation(len(seen))
        assert sum(seen) == rows(run)
    with run.no_sync(model):
        run.backward(model(inputs).float().square().mean())
    optimizer.zero_grad()
    done.operation()


def save_and_load(run: Accelerator, done: Done) -> None:
    """One save that blocks, two in the background, and a load of the newest."""
    run.save_state()
    run.save_state(blocking=False)
    newest = run.save_state(blocking=False)
    run.wait_for_checkpoint()
    run.load_state(str(newest))
    done.operation(5)


def exchange(run: Accelerator, done: Done, round_: int) -> None:
    """Collectives of tensors and objects, messages, groups that come and go, and shared tensors."""
    rank, size = run.process_index, run.num_processes
    assert gather_object([rank]) == list(range(size))
    assert broadcast_object_list([{"round": round_}, rank]) == [{"round": round_}, 0]
    assert run.gather(torch.full((rank + 1,) if size == 1 else (2,), float(rank))).shape[0] == 2 * size or size == 1
    run.pad_across_processes(torch.ones(rank + 1, 3))
    run.wait_for_everyone()
    total = run.reduce(torch.ones(1000 * (1 + round_ % 7)), "sum")
    assert bool((total == size).all())
    done.operation(6)
    work = [dist.all_reduce(torch.ones(2000), async_op=True) for _ in range(8)]
    peers = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(5000)
    work += [dist.isend(torch.full((5000,), float(rank)), peers[0]), dist.irecv(received, peers[1])]
    for one in work:
        one.wait()
    assert received[0] == peers[1]
    done.operation(len(work))
    for ranks in (list(range(size)), [0, size - 1], [rank]):
        group = dist.new_group(ranks, use_local_synchronization=True) if rank in ranks else None
        done.operation()
        if group is not None:
            shared = shared_empty(70_000 + 1000 * (round_ % 5))
            shared.fill_(1.0)
            for tensor in (shared, torch.ones(70_000)):
                dist.all_reduce(tensor, group=group)
                assert tensor[-1] == len(ranks)
            dist.destroy_process_group(group)
            done.operation(3)


def one_round(folder: Path, done: Done, round_: int, seed: int) -> None:
    run = new_accelerator(folder, KINDS[round_ % len(KINDS)], round_)
    model = model_of(seed + round_)
    data = TensorDataset(torch.randn(rows(run), WIDTH), torch.randn(rows(run), WIDTH))
    workers = 1 if round_ % 10 == 9 else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loaders = [DataLoader(data, batch_size=BATCH, shuffle=shuffle, num_workers=workers) for shuffle in (True, False)]
    prepared = list(run.prepare(model, optimizer, schedule, *loaders))
    del model, optimizer, schedule, loaders
    train_and_evaluate(run, prepared, done, epochs=3)
    save_and_load(run, done)
    exchange(run, done, round_)
    run.free_memory(*(prepared.pop() for _ in range(5)))


def main(folder: Path, seed: int, leak: str) -> None:
    done, goes_on, round_ = Done(leak), True, 0
    while goes_on:
        one_round(folder, done, round_, seed)
        gc.collect()
        facts = {"operations": done.operations, "steps": done.steps, "step_seconds": done.typical_step_seconds()}
        goes_on = stand_still(folder, f"rank{os.environ['RANK']}", round_, **facts)
        round_ += 1
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
