"""Prepared loaders of torchdata on several processes, beside the original's."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import run_processes

pytest.importorskip("torchdata.stateful_dataloader")

PACKAGES = ("accelerate", "accelerate_cpp")
SAMPLES, STEPS = 48, 2  # so many that no last step is completed: resumed, it would be with other samples
CASES = [
    {"dispatch": dispatch, "split": split, "workers": workers}
    for dispatch in (False, True)
    for split in (False, True)
    for workers in (0, 2)
]


# In the original states of the former are a batch ahead, so that what it resumes misses one; those of the latter are a
# batch behind, so that one comes twice.
AHEAD, BEHIND = ({"dispatch": True, "split": split, "workers": 0 if split else 2} for split in (False, True))


def prepared(package, case, seed=5, samples=SAMPLES):
    import importlib

    from torch.utils.data import DataLoader

    accelerate = importlib.import_module(package)
    importlib.import_module(f"{package}.utils").set_seed(seed)
    config = accelerate.DataLoaderConfiguration(
        use_stateful_dataloader=True,
        use_seedable_sampler=True,
        data_seed=seed,
        dispatch_batches=case["dispatch"],
        split_batches=case["split"],
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    data = list(range(samples))
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True, num_workers=case["workers"]))


def read(loader):
    return [batch.tolist() for batch in loader]


def save_alone(loader, folder):
    """Writes again what all processes of the original write at once."""
    import torch

    torch.save(loader.state_dict(), Path(folder, "dl_state_dict.bin"))


def stopped_runs(package, folder):
    """Of each case this rank's state inside an epoch, as plain values, and what it sees of that epoch afterwards."""
    import copy

    runs = []
    for number, case in enumerate(CASES):
        accelerator, loader = prepared(package, case)
        read(loader)
        rest, state = [], {}
        for step, batch in enumerate(loader, start=1):
            if step > STEPS:
                rest.append(batch.tolist())
            elif step == STEPS:
                path = Path(folder, f"{package}{number}")
                accelerator.save_state(str(path))
                state = copy.deepcopy(loader.state_dict())
                accelerator.wait_for_everyone()
                if package == "accelerate" and accelerator.is_main_process:
                    save_alone(loader, path)
                accelerator.wait_for_everyone()
        state.pop("_cursor", None)
        state.get("_snapshot", {}).get("_main_snapshot", {}).pop("_base_seed", None)
        runs.append((state, rest))
        accelerator.free_memory()
    accelerator.end_training()
    return runs


def resumed_runs(package, writer, folder):
    """What fresh processes see of the epoch."""
    seen = []
    for number, case in enumerate(CASES):
        accelerator, loader = prepared(package, case)
        accelerator.load_state(f"{folder}/{writer}{number}")
        loader.set_epoch(1)
        seen.append(read(loader))
        accelerator.free_memory()
    accelerator.end_training()
    return seen


@pytest.mark.long
def test_states_are_those_of_the_original_and_each_package_continues_the_other(tmp_path: Path):
    runs = {package: run_processes(stopped_runs, 2, package, str(tmp_path)) for package in PACKAGES}
    for rank in range(2):
        for case, expected, found in zip(CASES, *(runs[package][rank] for package in PACKAGES), strict=True):
            assert found[1] == expected[1], (case, rank)
            # Who does not read has no state that means anything.
            if case not in (AHEAD, BEHIND) and not (case["dispatch"] and rank > 0):
                assert found[0] == expected[0], (case, rank)
    for reader in PACKAGES:
        for writer in PACKAGES:
            resumed = run_processes(resumed_runs, 2, reader, writer, str(tmp_path))
            for rank in range(2):
                for case, (_, rest), found in zip(CASES, runs[writer][rank], resumed[rank], strict=True):
                    by_original = writer == "accelerate" and (case == BEHIND or (case == AHEAD and reader == writer))
                    assert (found != rest) if by_original else (found == rest), (case, rank, reader, writer)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_short_last_step_of_the_original_is_found_again(tmp_path: Path, workers):
    """Of three processes, of which the last step has one batch."""
    case = {"dispatch": True, "split": False, "workers": workers}
    expected, found = (run_processes(before_the_last_step, 3, package, case, str(tmp_path)) for package in PACKAGES)
    # The rows after these were added to the step, from the first one that was read.
    (expected,), (found,) = (zip(*ranks, strict=True) for ranks in (expected, found))
    assert [row for rank in found for row in rank][:4] == [row for rank in expected for row in rank][:4]


def before_the_last_step(package, case, folder):
    """The original saves before its last step; returns what each package then sees."""
    accelerator, loader = prepared(package, case, samples=40)
    if package == "accelerate_cpp":
        accelerator.load_state(f"{folder}/c")
        loader.set_epoch(1)
        rest = read(loader)
    else:
        read(loader)
        rest = []
        for step, batch in enumerate(loader, start=1):
            if step == 3:
                accelerator.save_state(f"{folder}/c")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    save_alone(loader, f"{folder}/c")
                accelerator.wait_for_everyone()
            elif step > 3:
                rest.append(batch.tolist())
    accelerator.end_training()
    return rest


def test_another_number_of_processes_continues_by_our_cursor(tmp_path: Path):
    written = run_processes(stopped_runs, 2, "accelerate_cpp", str(tmp_path))
    (alone,) = run_processes(resumed_runs, 1, "accelerate_cpp", "accelerate_cpp", str(tmp_path))
    for number, (case, found) in enumerate(zip(CASES, alone, strict=True)):
        rests = [rank[number][1] for rank in written]
        expected = [sample for step in zip(*rests, strict=True) for batch in step for sample in batch]
        assert [sample for batch in found for sample in batch] == expected, case


def streams(folder, resumes):
    """Each rank reads files of its own, in which the dataset has a place; returns what it sees after a checkpoint."""
    from torch.utils.data import DataLoader, IterableDataset

    from accelerate_cpp import Accelerator, DataLoaderConfiguration

    class Files(IterableDataset):
        n_shards = 2

        def __init__(self, index=None):
            self.index, self.next = index, 0

        def shard(self, num_shards, index):
            return Files(index)

        def __iter__(self):
            # The second rank has longer lines, so that its place is another one.
            while self.next < 20 * (1 + self.index):
                self.next += 1 + self.index
                yield 100 * self.index + self.next
            self.next = 0

        def state_dict(self):
            return {"next": self.next}

        def load_state_dict(self, state):
            self.next = state["next"]

    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Files(), batch_size=2))
    if resumes:
        accelerator.load_state(f"{folder}/c")
        rest = read(loader)
    else:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        accelerator.save_state(f"{folder}/c")
        rest = read(batches)
    accelerator.end_training()
    return rest


def test_each_process_has_the_state_of_its_own_dataset_back(tmp_path: Path):
    written = run_processes(streams, 2, str(tmp_path), False)
    assert written[0] != written[1]
    assert {path.name for path in (tmp_path / "c").glob("dl_*")} == {"dl_state_dict.bin", "dl_state_dict_rank1.bin"}
    assert run_processes(streams, 2, str(tmp_path), True) == written
