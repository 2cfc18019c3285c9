"""Runs that stop inside an epoch and are continued by fresh processes, as many or another number of them."""

from __future__ import annotations

import json

import pytest

from processes import run_processes

SAMPLES, BATCH_SIZE, STEPS = 50, 2, 3
CASES = [
    {"shuffle": shuffle, "seedable": seedable, "dispatch": dispatch, "stateful": stateful, "epochs": epochs}
    for shuffle, seedable in ((False, False), (True, False), (True, True))
    for dispatch in (False, True)
    for stateful in (False, True)
    for epochs in (0, 1)
]


def prepared(accelerator, case):
    from torch.utils.data import DataLoader

    from accelerate_cpp.utils import DataLoaderConfiguration

    accelerator.dataloader_config = DataLoaderConfiguration(
        use_seedable_sampler=case["seedable"],
        dispatch_batches=case["dispatch"],
        use_stateful_dataloader=case["stateful"],
    )
    return accelerator.prepare(DataLoader(list(range(SAMPLES)), batch_size=BATCH_SIZE, shuffle=case["shuffle"]))


def gathered(accelerator, loader):
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def flat(batches):
    return [sample for batch in batches for sample in batch]


def first_run(seed):
    """Of each case the cursor after some steps of an epoch, and the batches from there to the end of the next epoch."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.data.cursor import cursor_of

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed + accelerator.process_index)
    runs = []
    for case in CASES:
        loader = prepared(accelerator, case)
        for _ in range(case["epochs"]):
            gathered(accelerator, loader)
        rest = []
        for number, batch in enumerate(loader, start=1):
            rows = accelerator.gather_for_metrics(batch).tolist()
            if number > STEPS:
                rest.append(rows)
            elif number == STEPS:
                cursor = json.dumps(cursor_of(loader))
        runs.append((cursor, rest, gathered(accelerator, loader)))
    accelerator.end_training()
    return runs


def second_run(seed, cursors):
    """Of each case what fresh loaders give that were restored, and the next epoch."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.data.cursor import restore_cursor

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed + accelerator.process_index)
    runs = []
    for case, cursor in zip(CASES, cursors, strict=True):
        loader = prepared(accelerator, case)
        restore_cursor(loader, json.loads(cursor))
        rest = loader if case["stateful"] else accelerator.skip_first_batches(loader, STEPS)
        runs.append((gathered(accelerator, rest), gathered(accelerator, loader), loader.iteration))
    accelerator.end_training()
    return runs


@pytest.fixture(scope="module")
def stopped():
    return run_processes(first_run, 2, 5)[0]


def drawn_anew(case):
    """Whether the order of the next epoch comes from torch's own generator, which is not part of a cursor."""
    return case["dispatch"] and case["shuffle"] and not case["seedable"]


def test_fresh_processes_see_the_remaining_batches_and_the_next_epoch(stopped):
    for runs in run_processes(second_run, 2, 99, [cursor for cursor, _, _ in stopped]):
        for case, (_, rest, following), (found, found_next, epoch) in zip(CASES, stopped, runs, strict=True):
            assert found == rest, case
            assert epoch == case["epochs"] + 2
            assert drawn_anew(case) or found_next == following, case


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_processes_sees_the_same_samples(stopped, world_size):
    (runs, *_) = run_processes(second_run, world_size, 99, [cursor for cursor, _, _ in stopped])
    for case, (_, rest, following), (found, found_next, _) in zip(CASES, stopped, runs, strict=True):
        if case["stateful"]:
            assert flat(found) == flat(rest), case
            assert drawn_anew(case) or flat(found_next) == flat(following), case
