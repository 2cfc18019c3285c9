"""``use_seedable_sampler=True`` beside the original: the same samples in the same order, and each resumes the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import run_processes

PACKAGES = ("accelerate", "accelerate_cpp")
SAMPLES, EPOCHS, STEPS = 45, 3, 2
CASES = [
    {},
    {"config": {"data_seed": 7}},
    {"config": {"split_batches": True}},
    {"config": {"dispatch_batches": True}},
    {"config": {"even_batches": False}, "loader": {"drop_last": True}},
    {"loader": {"num_workers": 2}},
    {"sampler": {"num_samples": 30}},
    {"sampler": {"num_samples": 100}},
    {"sampler": {"num_samples": 40, "replacement": True}},
    {"sampler": {}, "own_generator": True},
]
RESUMED = [case for case in CASES if not case.get("config", {}).get("dispatch_batches")]


def prepared(package, case, seed):
    """An accelerator of ``package``, and what it makes of a shuffled loader. Both packages are used in one way."""
    import importlib

    import torch
    from torch.utils.data import DataLoader, RandomSampler

    accelerate = importlib.import_module(package)
    importlib.import_module(f"{package}.utils").set_seed(seed)
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, **case.get("config", {}))
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    data, options = list(range(SAMPLES)), {"shuffle": True}
    if "sampler" in case:
        generator = torch.Generator().manual_seed(3) if "own_generator" in case else None
        options = {"sampler": RandomSampler(data, generator=generator, **case["sampler"])}
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=4, **options, **case.get("loader", {})))


def read(loader):
    return [batch.tolist() for batch in loader]


def epochs_of(package, seed):
    """This rank's batches of each case, in several epochs and in an early one again."""
    seen = []
    for case in CASES:
        accelerator, loader = prepared(package, case, seed)
        seen.append([read(loader) for _ in range(EPOCHS)])
        loader.set_epoch(1)
        seen[-1].append(read(loader))
    accelerator.end_training()
    return seen


def stopped_runs(package, seed, folder):
    """Saves a checkpoint in epoch 1 of each case; returns what this rank sees of that epoch after it, and the next."""
    seen = []
    for number, case in enumerate(RESUMED):
        accelerator, loader = prepared(package, case, seed)
        read(loader)
        rest = []
        for step, batch in enumerate(loader, start=1):
            if step > STEPS:
                rest.append(batch.tolist())
            elif step == STEPS:
                accelerator.save_state(f"{folder}/{package}{number}")
        seen.append([rest, read(loader)])
        accelerator.free_memory()
    accelerator.end_training()
    return seen


def resumed_runs(package, writer, seed, folder):
    """As :func:`stopped_runs`, by fresh processes that load its checkpoints."""
    seen = []
    for number, case in enumerate(RESUMED):
        accelerator, loader = prepared(package, case, seed)
        accelerator.load_state(f"{folder}/{writer}{number}")
        loader.set_epoch(1)
        rest = read(accelerator.skip_first_batches(loader, STEPS))
        loader.set_epoch(2)
        seen.append([rest, read(loader)])
        accelerator.free_memory()
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_samples_come_in_the_order_of_the_original(world_size):
    theirs, ours = (run_processes(epochs_of, world_size, package, 5) for package in PACKAGES)
    for rank in range(world_size):
        for case, expected, found in zip(CASES, theirs[rank], ours[rank], strict=True):
            assert found == expected, (case, rank)
            assert found[0] != found[1] == found[EPOCHS], (case, rank)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.long
def test_each_package_resumes_the_other_inside_an_epoch(tmp_path: Path, world_size):
    written = {package: run_processes(stopped_runs, world_size, package, 5, str(tmp_path)) for package in PACKAGES}
    for reader in PACKAGES:
        for writer in PACKAGES:
            resumed = run_processes(resumed_runs, world_size, reader, writer, 5, str(tmp_path))
            for rank in range(world_size):
                for case, expected, found in zip(RESUMED, written[writer][rank], resumed[rank], strict=True):
                    assert found == expected, (case, rank, writer, reader)
