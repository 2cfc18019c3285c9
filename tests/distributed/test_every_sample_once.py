"""Every sample is gathered exactly once, however it is loaded: many random combinations in one start of processes."""

from __future__ import annotations

import pytest

from processes import run_processes

DRAWS = 80


def draw(random, world_size):
    """One random combination, as the arguments of ``case``."""
    kind = random.choice(["list", "shuffled", "seedable", "batches", "stream", "sized stream"])
    split = random.random() < 0.3
    batch_size = random.randint(1, 4) * (world_size if split else 1)
    return {
        "kind": kind,
        "samples": random.randint(1, 40),
        "batch_size": batch_size,
        "drop_last": random.random() < 0.3,
        "split": split and kind != "batches",
        "dispatch": random.choice([False, True]),
        "even": random.random() < 0.7,
        "skips": [random.randint(0, 3) for _ in range(random.randint(0, 2))],
        "nested": random.random() < 0.3,
        "broken_first": random.random() < 0.3,
        "workers": random.choice([0, 0, 0, 1]),
        "pairs": random.random() < 0.5,
        "resumed": random.random() < 0.3,
        "seed": random.randint(0, 1000),
    }


def build(case, seed_offset=0):
    import torch
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

    from accelerate_cpp.data_loader import prepare_data_loader

    class Stream(IterableDataset):
        def __init__(self, samples):
            self.samples = samples

        def __iter__(self):
            return (sample(index) for index in range(self.samples))

    class SizedStream(Stream):
        def __len__(self):
            return self.samples

    def sample(index):
        return {"x": torch.tensor([float(index)] * 3), "id": index} if case["pairs"] else index

    kind, samples = case["kind"], case["samples"]
    options = {"num_workers": case["workers"]}
    torch.manual_seed(case["seed"] + seed_offset)
    if kind.endswith("stream"):
        dataset = (Stream if kind == "stream" else SizedStream)(samples)
        loader = DataLoader(dataset, batch_size=case["batch_size"], drop_last=case["drop_last"], **options)
    elif kind == "batches":
        batches = BatchSampler(SequentialSampler(range(samples)), case["batch_size"], case["drop_last"])
        loader = DataLoader([sample(index) for index in range(samples)], batch_sampler=batches, **options)
    else:
        loader = DataLoader(
            [sample(index) for index in range(samples)],
            batch_size=case["batch_size"],
            shuffle=kind != "list",
            drop_last=case["drop_last"],
            **options,
        )
    return prepare_data_loader(
        loader,
        torch.device("cpu"),
        split_batches=case["split"],
        put_on_device=True,
        rng_types=["generator"],
        dispatch_batches=case["dispatch"],
        even_batches=case["even"],
        use_seedable_sampler=kind == "seedable",
        use_stateful_dataloader=True,
    )


def expected(case, world_size):
    """How many samples each pass gives after what is skipped, and the first of them in a loader without shuffle."""
    per_step = case["batch_size"] * (1 if case["split"] else world_size)
    kept = case["samples"]
    if case["drop_last"]:
        kept -= kept % per_step
    return kept, min(kept, sum(case["skips"]) * per_step)


def read(accelerator, loader, case, inner=None, stop=None):
    """The gathered samples, and whether the batches were all of one length on all processes."""
    from accelerate_cpp.utils.operations import gather_object

    seen = []
    for number, batch in enumerate(loader):
        if inner is not None:
            inner()
        ids = batch["id"] if case["pairs"] else batch
        if case["pairs"]:
            assert batch["x"][:, 0].tolist() == ids.tolist()
        if case["even"] or case["dispatch"]:
            seen += accelerator.gather_for_metrics(ids).tolist()
        else:  # processes may have unequal batches, or none
            seen += ids.tolist()
        if stop is not None and number == stop:
            break
    return seen if case["even"] or case["dispatch"] else gather_object(seen)


def wrong_in(accelerator, case):
    """What is wrong with one combination; ``None`` if nothing is."""
    from accelerate_cpp.data_loader import skip_first_batches

    world_size = accelerator.num_processes
    uneven = not (case["even"] or case["dispatch"])
    if uneven and case["kind"].endswith("stream"):
        case = {**case, "even": True}
        uneven = False
    loader = build(case)
    kept, skipped = expected(case, world_size)
    if case["broken_first"] and not uneven:
        read(accelerator, loader, case, stop=0)
    if accelerator.gradient_state.active_dataloader is not None:
        return "a loader is still active after a break"
    inner = None
    if case["nested"] and not uneven:
        other = build({**case, "samples": 3, "kind": "list", "dispatch": False, "pairs": False, "even": True})
        small = {"pairs": False, "even": True, "dispatch": False}

        def inner():
            per_step = case["batch_size"] * (1 if case["split"] else world_size)
            found = read(accelerator, other, small)
            assert found == list(range(3 - 3 % per_step if case["drop_last"] else 3)), found

    later = loader
    for skip in case["skips"]:
        later = skip_first_batches(later, skip)
    seen = read(accelerator, later, case, inner)
    ordered = case["kind"] in ("list", "batches", "stream", "sized stream")
    if len(seen) != kept - skipped or len(set(seen)) != len(seen):
        return f"{len(seen)} samples, {len(set(seen))} different ones, instead of {kept - skipped}: {seen}"
    if ordered and sorted(seen) != list(range(skipped, kept)):
        return f"other samples than {skipped} to {kept}: {seen}"
    if ordered and not uneven and seen != sorted(seen):
        return f"another order: {seen}"
    if case["resumed"] and not uneven:
        return wrong_after_restoring(accelerator, loader, case)
    return None


def wrong_after_restoring(accelerator, loader, case):
    """The rest of a pass, read on from a cursor, is what an uninterrupted pass gives."""
    from accelerate_cpp.utils.operations import broadcast_object_list

    state, whole, before = None, [], 0
    for number, batch in enumerate(loader):
        whole += accelerator.gather_for_metrics(batch["id"] if case["pairs"] else batch).tolist()
        if number == 0 and not loader.end_of_dataloader:
            (state,), before = broadcast_object_list([loader.state_dict()]), len(whole)
    if state is None:
        return None
    fresh = build(case, seed_offset=1)
    fresh.load_state_dict(state)
    rest = read(accelerator, fresh, case)
    return None if rest == whole[before:] else f"restored: {rest} instead of {whole[before:]}"


def many_cases(seed, draws):
    """Those of ``draws`` random combinations in which something is wrong, with what it is."""
    import random

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    numbers = random.Random(seed)
    wrong = []
    for _ in range(draws):
        case = draw(numbers, accelerator.num_processes)
        found = wrong_in(accelerator, case)
        if accelerator.gradient_state.active_dataloader is not None:
            found = "a loader is still active"
        if found is not None:
            wrong.append((case, found))
    accelerator.end_training()
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_sample_is_gathered_exactly_once_whatever_the_loader(world_size):
    assert run_processes(many_cases, world_size, world_size, DRAWS) == [[]] * world_size
