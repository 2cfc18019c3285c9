"""Cursors: what is saved of a loader, and what a fresh one gives after it was restored."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate_cpp.data import cursor
from accelerate_cpp.data.cursor import (
    Pass,
    Progress,
    Start,
    cursor_of,
    read_ahead_from,
    restore_cursor,
    restore_read_ahead,
)
from accelerate_cpp.data.order import encoded
from accelerate_cpp.data_loader import prepare_data_loader, skip_first_batches
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare import tracked_loader
from accelerate_cpp.runtime import current

SHUFFLES = ("no", "torch", "generator", "seedable", "seed of torch", "seed, computed")


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __iter__(self):
        return iter(range(self.samples))


def build(
    samples=20, batch_size=2, world=1, shuffle="no", seed=5, split=False, stateful=True, dispatch=False, workers=0
):
    """The prepared loaders of ``world`` simulated ranks, made as processes make them that agree on generators."""
    prepared = []
    for rank in range(world):
        torch.manual_seed(seed)
        loader = DataLoader(
            samples if isinstance(samples, IterableDataset) else list(range(samples)),
            batch_size=batch_size * world if split else batch_size,
            shuffle=None if isinstance(samples, IterableDataset) else shuffle != "no",
            generator=torch.Generator().manual_seed(seed) if shuffle == "generator" else None,
            num_workers=workers,
        )
        prepared.append(
            prepare_data_loader(
                loader,
                torch.device("cpu"),
                num_processes=world,
                process_index=rank,
                put_on_device=True,
                split_batches=split,
                dispatch_batches=dispatch,
                use_seedable_sampler="computed" if shuffle == "seed, computed" else shuffle.startswith("seed"),
                data_seed=seed if shuffle == "seedable" else None,
                use_stateful_dataloader=stateful,
            )
        )
    return prepared


def gathered(prepared):
    """What each step of all ranks gives, without what was added to complete the last one."""
    seen = []
    for step in zip(*prepared, strict=True):
        rows = torch.cat(step).tolist()
        loader = prepared[0]
        seen.append(rows[: loader.remainder] if loader.end_of_dataloader and loader.remainder > 0 else rows)
    return seen


def flat(batches):
    return [sample for batch in batches for sample in batch]


def stopped(prepared, epochs, position):
    """Reads ``epochs`` passes and ``position`` steps; returns the cursor then, and all that comes after it."""
    for _ in range(epochs):
        gathered(prepared)
    if position == 0:
        return cursor_of(prepared[0]), gathered(prepared)
    cursor, rest = None, []
    for number, step in enumerate(zip(*prepared, strict=True), start=1):
        rows, loader = torch.cat(step).tolist(), prepared[0]
        if number > position:
            rest.append(rows[: loader.remainder] if loader.end_of_dataloader and loader.remainder > 0 else rows)
        elif number == position:
            cursor = cursor_of(loader)
    return cursor, rest


@settings(deadline=None, max_examples=150)
@given(
    shuffle=st.sampled_from(SHUFFLES),
    epochs=st.integers(0, 2),
    position=st.integers(0, 4),
    world=st.integers(1, 3),
    batch_size=st.integers(1, 2),
    split=st.booleans(),
    stateful=st.booleans(),
)
def test_a_fresh_loader_gives_the_remaining_samples_in_their_order(
    shuffle, epochs, position, world, batch_size, split, stateful
):
    options = {"samples": 31, "batch_size": batch_size, "world": world, "shuffle": shuffle, "split": split}
    cursor, rest = stopped(build(**options, stateful=stateful), epochs, position)
    fresh = build(**options, stateful=stateful, seed=5 if shuffle == "generator" else 99)
    for loader in fresh:
        restore_cursor(loader, json.loads(json.dumps(cursor)))
    resumed = fresh if stateful else [skip_first_batches(loader, position) for loader in fresh]
    if shuffle == "torch" and world == 1 and position == 0:
        assert sorted(flat(gathered(resumed))) == sorted(flat(rest))  # the order is drawn from torch's generator
    else:
        assert gathered(resumed) == rest
    assert {loader.iteration for loader in fresh} == {epochs + 1}
    assert cursor["position"] == position


@settings(deadline=None, max_examples=150)
@given(
    shuffle=st.sampled_from(SHUFFLES),
    position=st.integers(1, 4),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    split=st.booleans(),
)
def test_another_number_of_processes_continues_with_the_same_samples(shuffle, position, worlds, sizes, split):
    options = {"samples": 31, "shuffle": shuffle, "split": split}
    before = build(**options, world=worlds[0], batch_size=sizes[0])
    cursor, rest = stopped(before, 1, position)
    fresh = build(**options, world=worlds[1], batch_size=sizes[1], seed=5 if shuffle == "generator" else 99)
    for loader in fresh:
        restore_cursor(loader, cursor)
    assert flat(gathered(fresh)) == flat(rest)
    # Drawn from torch's generator in one process, from one that is part of the cursor in several.
    if shuffle != "torch" or worlds[0] > 1:
        assert flat(gathered(fresh)) == flat(gathered(before))
    assert sorted(flat(gathered(fresh))) == list(range(31))


@pytest.mark.parametrize("written", ["seedable", "seed, computed"])
@pytest.mark.parametrize("read", ["seedable", "seed, computed"])
def test_a_pass_continues_in_the_order_that_it_began_with(written, read):
    cursor, rest = stopped(build(shuffle=written), 1, 3)
    (fresh,) = build(shuffle=read)
    restore_cursor(fresh, cursor)
    assert gathered([fresh]) == rest


def test_the_order_of_a_cursor_that_names_none_was_computed():
    cursor, rest = stopped(build(shuffle="seed, computed"), 1, 3)
    del cursor["order"]
    (fresh,) = build(shuffle="seedable")
    restore_cursor(fresh, cursor)
    assert gathered([fresh]) == rest


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_epochs_after_a_resumed_one_are_those_of_the_uninterrupted_run(shuffle, workers):
    (loader,) = build(shuffle=shuffle, workers=workers)
    list(loader)
    batches = iter(loader)
    next(batches)
    cursor, state = cursor_of(loader), torch.get_rng_state()
    expected = [[batch.tolist() for batch in batches], *(gathered([loader]) for _ in range(2))]
    (fresh,) = build(shuffle=shuffle, workers=workers)
    restore_cursor(fresh, cursor)
    torch.set_rng_state(state)
    assert [gathered([fresh]) for _ in range(3)] == expected


def test_a_cursor_says_where_the_loop_is():
    (loader,) = build(samples=6)
    places = [(cursor_of(loader)["epoch"], cursor_of(loader)["position"])]
    for _ in loader:
        cursor = cursor_of(loader)
        places.append((cursor["epoch"], cursor["position"]))
    places.append((cursor_of(loader)["epoch"], cursor_of(loader)["position"]))
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 0)]
    for _ in loader:
        break
    assert (cursor_of(loader)["epoch"], cursor_of(loader)["position"], cursor_of(loader)["samples"]) == (1, 1, 2)


def test_the_position_counts_what_was_skipped_and_is_that_of_the_loader_it_was_skipped_in():
    (loader,) = build(samples=10)
    for _ in skip_first_batches(skip_first_batches(loader, 1), 2):
        assert cursor_of(loader)["position"] == 4
        break
    for _ in skip_first_batches(loader, 2):
        pass
    assert (cursor_of(loader)["epoch"], cursor_of(loader)["position"]) == (1, 0)
    assert list(skip_first_batches(loader, 5)) == []
    assert cursor_of(loader)["epoch"] == 2


def test_an_abandoned_pass_does_not_disturb_the_next_one():
    (loader,) = build(samples=4)
    abandoned = iter(loader)
    next(abandoned)
    for _ in loader:
        abandoned.close()
        position = cursor_of(loader)["position"]
        break
    assert position == 1


def test_a_pass_in_progress_can_be_resumed_twice():
    (loader,) = build(samples=12, shuffle="torch")
    cursor, rest = stopped([loader], 0, 1)
    (second,) = build(samples=12, shuffle="torch", seed=7)
    restore_cursor(second, cursor)
    batches = iter(second)
    assert next(batches).tolist() == rest[0]
    (third,) = build(samples=12, shuffle="torch", seed=8)
    restore_cursor(third, cursor_of(second))
    assert gathered([third]) == rest[1:]


def test_a_loader_that_is_not_stateful_starts_the_epoch_anew():
    (loader,) = build(samples=12, shuffle="torch", stateful=False)
    batches = iter(loader)
    order = [next(batches).tolist() for _ in range(3)]
    cursor = cursor_of(loader)
    order += [batch.tolist() for batch in batches]
    (fresh,) = build(samples=12, shuffle="torch", seed=8, stateful=False)
    restore_cursor(fresh, cursor)
    assert gathered([fresh]) == order
    restore_cursor(fresh, cursor, continues=True)
    assert gathered([fresh]) == order[3:]


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_continues(dispatch):
    (loader,) = build(Stream(11), dispatch=dispatch)
    cursor, rest = stopped([loader], 1, 2)
    (fresh,) = build(Stream(11), dispatch=dispatch)
    restore_cursor(fresh, cursor)
    assert gathered([fresh]) == rest == [[4, 5], [6, 7], [8, 9], [10]]
    assert gathered([fresh])[0] == [0, 1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 5])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stream_continues_on_another_number_of_processes(world, batch_size, workers):
    cursor, _ = stopped(build(Stream(17), world=2), 0, 2)
    loaders = build(Stream(17), batch_size=batch_size, world=world, workers=workers)
    for loader in loaders:
        restore_cursor(loader, cursor)
    assert flat(gathered(loaders)) == list(range(8, 17))
    assert loaders[0].iteration == 1
    assert flat(gathered(loaders)) == list(range(17))


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_dispatched_stream_continues_where_no_step_begins(batch_size):
    (loader,) = build(Stream(17), dispatch=True)
    cursor, _ = stopped([loader], 0, 3)
    (fresh,) = build(Stream(17), batch_size=batch_size, dispatch=True)
    restore_cursor(fresh, cursor)
    assert flat(gathered([fresh])) == list(range(6, 17))


def test_where_several_workers_read_a_stream_a_step_has_to_begin():
    cursor, _ = stopped(build(Stream(17), world=2), 0, 2)
    (reached,) = build(Stream(17), batch_size=4, workers=2)
    restore_cursor(reached, cursor)
    with pytest.raises(InvalidArgument, match="is at sample 8, which is not the start of a step of 1 batches of 3"):
        restore_cursor(build(Stream(17), batch_size=3, workers=2)[0], cursor)


def test_batches_of_ones_own_continue_by_their_number():
    def prepared(world, batches):
        loader = DataLoader(list(range(20)), batch_sampler=batches)
        return [
            prepare_data_loader(loader, num_processes=world, process_index=rank, use_stateful_dataloader=True)
            for rank in range(world)
        ]

    batches = [[0], [1, 2], [3], [4, 5, 6], [7], [8, 9], [10]]
    loaders = prepared(2, batches)
    for number, _ in enumerate(zip(*loaders, strict=True)):
        if number == 1:
            break
    cursor = cursor_of(loaders[0])
    assert (cursor["position"], cursor["batches"], cursor["samples"]) == (2, 4, -1)
    for saved in (cursor, {**cursor, "position": 0}):  # of less than a step of the run that saved
        (alone,) = prepared(1, batches)
        restore_cursor(alone, saved)
        assert [batch.tolist() for batch in alone] == batches[4:]


def test_a_place_inside_a_batch_needs_a_sampler_that_can_start_there():
    cursor, _ = stopped(build(20, batch_size=3), 0, 1)
    skipped = skip_first_batches(DataLoader(list(range(20)), batch_size=2), 1)
    loader = prepare_data_loader(skipped, use_stateful_dataloader=True)
    restore_cursor(loader, cursor)
    with pytest.raises(InvalidArgument, match="inside a batch of this loader's SkipBatchSampler"):
        list(loader)


def test_a_sampler_of_batches_given_as_sampler_continues():
    class Rows(list):
        def __getitem__(self, rows):
            return torch.tensor(rows)

    def over_rows():
        sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
        return prepare_data_loader(
            DataLoader(Rows(range(8)), sampler=sampler, batch_size=None), use_stateful_dataloader=True
        )

    loader, fresh = over_rows(), over_rows()
    for _ in loader:
        break
    restore_cursor(fresh, cursor_of(loader))
    assert [batch.tolist() for batch in fresh] == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("dispatch", [True, False])
def test_only_who_reads_for_all_goes_on_within_a_step_of_a_stream_that_workers_read(dispatch, monkeypatch):
    loader = build(Stream(40), world=2, dispatch=dispatch, workers=2)[0]
    monkeypatch.setattr(type(loader), "batches_per_step", 2)  # a process that reads for all asks its group
    three_batches = {"position": 3, "batches": 3, "samples": 6, "world": 1}
    if dispatch:
        assert cursor._converted(loader, three_batches) == cursor.Start(batches=3)
    else:
        with pytest.raises(InvalidArgument, match="at sample 6, which is not the start of a step of 2 batches of 2"):
            cursor._converted(loader, three_batches)


@pytest.mark.parametrize(
    ("stream", "finished", "kept"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_what_the_original_read_ahead_is_counted_where_the_order_can_be_gone_on_with(
    stream, finished, kept, monkeypatch
):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = Stream(8) if stream else range(8)
    theirs = torchdata.StatefulDataLoader(dataset, batch_size=2)
    batches = iter(theirs)
    next(batches)
    assert len(list(batches) if finished else []) == (3 if finished else 0)
    state = theirs.state_dict()
    loader = build(Stream(8) if stream else 8, world=2, dispatch=True)[0]
    monkeypatch.setattr(type(loader), "batches_per_step", 2)  # it asks its group
    assert (cursor._in_whole_steps(loader, state) == state) is kept


class OneBatch:
    """What is recorded of a source that had one batch here."""

    def after(self, batches: int, is_last: bool) -> dict[str, object]:
        assert is_last or batches == 1, "there is no such batch"
        return {"batches": batches, "last": is_last}


def test_a_batch_that_is_repeated_moves_the_position_but_not_the_source() -> None:
    progress = Progress()
    progress.latest = reading = Pass(Start(), False, 2, 1, 1, recorded=OneBatch())  # type: ignore[arg-type]
    progress.advance(reading, is_last=False)
    progress.advance(reading, is_last=False, repeated=True)
    assert (progress.steps, progress.in_pass, progress.source) == (2, True, {"batches": 1, "last": False})
    progress.advance(reading, is_last=True, repeated=True)
    assert (progress.steps, progress.in_pass, progress.source) == (3, False, {"batches": 3, "last": True})


class Bunches:
    """Batches in an order that is drawn at once, when an iterator is asked for."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(12).reshape(6, 2).tolist())


ORDERS = {
    "in order": lambda: {"batch_size": 2},
    "shuffled": lambda: {"batch_size": 2, "shuffle": True},
    "generator": lambda: {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(12))},
    "weighted": lambda: {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 12, 12, replacement=False)},
    "single samples": lambda: {"batch_size": None, "shuffle": True},
    "batches drawn at once": lambda: {"batch_sampler": Bunches()},
    "seed for workers": lambda: {
        "batch_size": 2,
        "sampler": SubsetRandomSampler(range(12)),
        "generator": torch.Generator().manual_seed(4),
    },
    "workers that persist": lambda: {
        "batch_size": 2,
        "sampler": SubsetRandomSampler(range(12)),
        "num_workers": 1,
        "persistent_workers": True,
    },
    "workers that persist and a generator": lambda: {
        "batch_size": 2,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(4),
        "num_workers": 1,
        "persistent_workers": True,
    },
}


def ordered(order: str, world: int = 1, rank: int = 0, seed: int = 0, stateful: bool = False) -> Any:
    torch.manual_seed(seed)
    loader = DataLoader(torch.arange(12), **ORDERS[order]())
    return prepare_data_loader(
        loader,
        torch.device("cpu"),
        num_processes=world,
        process_index=rank,
        put_on_device=True,
        use_stateful_dataloader=stateful,
    )


def saved(loader: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """What a checkpoint keeps."""
    return json.loads(json.dumps(cursor_of(loader))), torch.get_rng_state()


def restored(order: str, checkpoint: tuple[dict[str, Any], torch.Tensor]) -> Any:
    fresh = ordered(order, seed=9)
    restore_cursor(fresh, checkpoint[0])
    torch.set_rng_state(checkpoint[1])
    return fresh


def after(loader: Any) -> list[Any]:
    """What a pass gives, and what a program draws in it and after it."""
    return [(batch.tolist(), torch.rand(1).item()) for batch in loader]


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_restored_pass_leaves_out_is_what_was_given_out_before(order: str) -> None:
    loader = ordered(order)
    after(loader)
    whole: list[Any] = []
    for batch in loader:
        whole.append((batch.tolist(), torch.rand(1).item()))
        if len(whole) == 4:
            checkpoint = saved(loader)
    expected = [*whole[4:], *after(loader)]
    fresh = restored(order, checkpoint)
    assert [*after(skip_first_batches(fresh, 4)), *after(fresh)] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_stateful_loader_goes_on_in_the_order_of_the_pass(order: str) -> None:
    loader = ordered(order, stateful=True)
    after(loader)
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        torch.rand(1)
        if len(whole) == 4:
            state = copy.deepcopy(loader.state_dict())
    fresh = ordered(order, seed=9, stateful=True)
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == whole[4:]


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch with noise."""
    return torch.as_tensor(samples) + torch.rand(len(samples))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_batch_that_was_read_ahead_is_drawn_as_it_was_before(
    steps: int, stream: bool, dispatch: bool, stateful: bool
) -> None:
    def loader_of(seed: int) -> Any:
        torch.manual_seed(seed)
        data = Stream(12) if stream else torch.arange(12)
        return prepare_data_loader(
            DataLoader(data, batch_size=2, shuffle=None if stream else True, collate_fn=noisy),
            torch.device("cpu"),
            put_on_device=True,
            dispatch_batches=dispatch,
            use_stateful_dataloader=stateful,
        )

    loader, whole = loader_of(0), []
    after(loader)
    for batch in loader:
        whole.append((batch.tolist(), torch.rand(1).item()))
        if len(whole) == steps:
            (cursor, state), ahead = saved(loader), read_ahead_from(loader)
    expected = [*whole[steps:], *after(loader)]
    fresh = loader_of(9)
    restore_cursor(fresh, cursor)
    restore_read_ahead(fresh, ahead)
    torch.set_rng_state(state)
    rest = after(fresh if stateful else skip_first_batches(fresh, steps))
    assert [*rest, *after(fresh)] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_after_a_loop_that_was_left_a_new_pass_begins_as_without_a_checkpoint(order: str) -> None:
    loader = ordered(order)
    after(loader)
    for _, _batch in zip(range(3), loader, strict=False):
        torch.rand(1)
    checkpoint = saved(loader)
    expected = [after(loader), after(loader)]
    fresh = restored(order, checkpoint)
    assert [after(fresh), after(fresh)] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_that_was_left_can_be_gone_on_with(order: str) -> None:
    loader = ordered(order)
    taken = [batch.tolist() for _, batch in zip(range(3), loader, strict=False)]
    checkpoint = saved(loader)
    rest = [batch for batch, _ in after(skip_first_batches(restored(order, checkpoint), len(taken)))]
    assert sorted(flat([batch] if isinstance(batch, int) else batch for batch in taken + rest)) == [*range(12)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_whose_last_batch_was_out_is_not_counted_again_by_a_program_that_skips_all_of_it(order: str) -> None:
    loader = ordered(order)
    for _batch in loader:
        if loader.end_of_dataloader:
            checkpoint, steps = saved(loader), cursor_of(loader)["ended"]
    expected = after(loader)
    fresh = restored(order, checkpoint)
    assert after(skip_first_batches(fresh, int(steps))) == []
    assert fresh.iteration == 1
    assert after(fresh) == expected
    # A program that knows better begins the next pass.
    fresh = restored(order, checkpoint)
    assert fresh.iteration == 1
    assert after(fresh) == expected


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 2)])
def test_an_order_that_is_drawn_goes_on_with_another_number_of_processes(before: int, now: int) -> None:
    seen, cursor = [], {}
    for rank in range(before):
        loader = ordered("subset", before, rank)
        for step, batch in enumerate(loader):
            seen += batch.tolist()
            if step == 1:
                cursor = cursor_of(loader)
                break
    for rank in range(now):
        loader = ordered("subset", now, rank, seed=9)
        restore_cursor(loader, cursor, continues=True)
        for batch in loader:
            kept = batch.tolist()
            seen += kept[: max(0, 12 - len(seen))]
    assert sorted(seen) == [*range(12)]


@pytest.mark.parametrize("name", ["generator", "generator_after", "drawn_from"])
@pytest.mark.parametrize("text", ["", "no base64!", "AAAA", "beyond"])
def test_a_state_that_is_none_of_torchs_generator_is_refused_before_anything_changes(name: str, text: str) -> None:
    loader = ordered("subset")
    if text == "beyond":  # words that lie after the end of the state
        state = torch.get_rng_state()
        struct.pack_into("<i", memoryview(state.numpy()).cast("B"), 8, 600)
        struct.pack_into("<Q", memoryview(state.numpy()).cast("B"), 16, 624)
        text = encoded(state)
    with pytest.raises(InvalidArgument, match=f"'{name}' of a loader's cursor"):
        restore_cursor(loader, cursor_of(loader) | {"epoch": 3, name: text})
    assert loader.iteration == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_is_saved_right_after_loading_is_what_was_loaded(order: str, at_the_end: bool) -> None:
    loader, seen = ordered(order), []
    for step, batch in enumerate(loader):
        seen.append(batch.tolist())
        torch.rand(1)  # as after() does
        if loader.end_of_dataloader if at_the_end else step == 3:
            checkpoint, steps = saved(loader), step + 1
    expected = [*seen[steps:], *(batch for batch, _ in after(loader))]
    fresh = restored(order, saved(restored(order, checkpoint)))
    found = [*after(skip_first_batches(fresh, steps)), *after(fresh)]
    assert [batch for batch, _ in found] == expected
    assert fresh.iteration == 2


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_that_goes_on_after_loading_is_not_disturbed(order: str, stateful: bool) -> None:
    """As in a program that takes back the weights after a bad step."""

    def passes(loads: bool) -> tuple[list[Any], dict[str, Any]]:
        loader = ordered(order, stateful=stateful)
        seen: list[Any] = []
        for _ in range(3):
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == 2:
                    cursor = saved(loader)[0]
                if len(seen) == 4 and loads:
                    restore_cursor(loader, cursor)
                if len(seen) == 5:
                    later = saved(loader)[0]
        return [*seen, loader.iteration], later

    assert passes(True) == passes(False)


class InAnotherOrder:
    """Shuffles the batches of another sampler, from torch's global generator."""

    def __init__(self, inner: BatchSampler) -> None:
        self.inner = self.batch_sampler = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.inner)
        for index in torch.randperm(len(batches)).tolist():
            yield batches[index]


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("generator", [False, True])
def test_a_sampler_that_draws_beside_its_inner_one_goes_on_in_its_order(generator: bool, stateful: bool) -> None:
    def loader_of(seed: int) -> Any:
        torch.manual_seed(seed)
        data = torch.arange(12)
        inner = RandomSampler(data, generator=torch.Generator().manual_seed(seed) if generator else None)
        sampler: Any = InAnotherOrder(BatchSampler(inner, 2, False))
        return prepare_data_loader(
            DataLoader(data, batch_sampler=sampler), torch.device("cpu"), use_stateful_dataloader=stateful
        )

    loader, whole = loader_of(0), []
    for batch in loader:
        whole.append(batch.tolist())
        if len(whole) == 2:
            cursor, state = saved(loader)
    fresh = loader_of(9)
    restore_cursor(fresh, cursor)
    torch.set_rng_state(state)
    assert [batch.tolist() for batch in (fresh if stateful else skip_first_batches(fresh, 2))] == whole[2:]


def test_the_order_of_a_pass_that_was_restored_before_is_forgotten() -> None:
    loader = ordered("shuffled")
    for step, _batch in enumerate(loader):
        if step == 2:
            within = saved(loader)[0]
    between = saved(loader)
    expected = after(loader)
    fresh = ordered("shuffled", seed=9)
    restore_cursor(fresh, within)
    restore_cursor(fresh, between[0])
    torch.set_rng_state(between[1])
    assert after(fresh) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("epoch", 1.0),
        ("seed", 2**70),
        ("position", None),
        ("samples", -2),
        ("batches", "3"),
        ("world", 0),
        ("left", {"a": 1}),
        ("ended", True),
        ("seeded", [1]),
    ],
)
def test_a_number_that_is_none_or_out_of_its_range_is_refused_before_anything_changes(name: str, value: Any) -> None:
    loader = ordered("shuffled")
    with pytest.raises(InvalidArgument, match=f"'{name}' of a loader's cursor: expected an integer from"):
        restore_cursor(loader, {**cursor_of(loader), "epoch": 3, name: value})
    assert loader.iteration == 0


def test_a_cursor_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a cursor of a loader is a mapping, found list"):
        restore_cursor(ordered("shuffled"), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (3, 1), (4, 2), (1, 2)])
def test_all_of_a_pass_that_had_ended_can_be_skipped_with_another_number_of_processes(before: int, now: int) -> None:
    loader = build(samples=10, world=before, stateful=False)[0]
    for _batch in loader:
        if loader.end_of_dataloader:
            cursor = cursor_of(loader)
    (fresh, *_) = build(samples=10, world=now, stateful=False)
    restore_cursor(fresh, cursor)
    assert list(skip_first_batches(fresh, len(fresh))) == []
    assert fresh.iteration == 1


class Lazily:
    """Draws one index after another from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield int(torch.randint(12, (), generator=self.generator))


def test_a_loop_that_goes_on_after_loading_draws_what_it_would_have_drawn() -> None:
    def indices(loads: bool) -> list[Any]:
        loader = prepare_data_loader(DataLoader(torch.arange(12), batch_size=2, sampler=Lazily()), torch.device("cpu"))
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == 2:
                    cursor = saved(loader)[0]
                if len(seen) == 3 and loads:
                    restore_cursor(loader, cursor)
        return seen

    assert indices(True) == indices(False)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_loop_that_goes_on_after_loading_keeps_its_seed(shuffle: str) -> None:
    """Where the checkpoint is that of another run, with more processes and another seed."""
    (other, _) = build(world=2, shuffle=shuffle, seed=8, stateful=False)
    next(iter(other))
    foreign = cursor_of(other)

    def passes(loads: bool) -> list[Any]:
        (loader,) = build(shuffle=shuffle, stateful=False)
        seen = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == 3 and loads:
                    restore_cursor(loader, foreign)
        return seen

    assert passes(True) == passes(False)


def test_all_of_a_stream_that_was_read_to_its_end_is_skipped_without_drawing() -> None:
    def loader_of(seed: int) -> Any:
        torch.manual_seed(seed)
        loader = DataLoader(Stream(12), batch_size=2, collate_fn=noisy)
        return prepare_data_loader(loader, torch.device("cpu"))

    loader = loader_of(0)
    for _batch in loader:
        if loader.end_of_dataloader:
            cursor, state = saved(loader)
    expected = after(loader)
    fresh = loader_of(9)
    restore_cursor(fresh, cursor)
    torch.set_rng_state(state)
    assert list(skip_first_batches(fresh, 6)) == []
    assert after(fresh) == expected


@pytest.mark.parametrize(("before", "now"), [(2, 1), (3, 1)])
def test_all_of_a_stream_that_had_ended_can_be_skipped_with_fewer_processes(before: int, now: int) -> None:
    loader = build(Stream(10), world=before, stateful=False)[0]
    for _batch in loader:
        if loader.end_of_dataloader:
            cursor = cursor_of(loader)
    (fresh, *_) = build(Stream(10), world=now, stateful=False)
    restore_cursor(fresh, cursor)
    assert list(skip_first_batches(fresh, len(fresh))) == []
    assert fresh.iteration == 1


def test_a_loader_that_skips_says_how_long_the_whole_pass_was() -> None:
    (loader,) = build(samples=12, stateful=False)
    skipping = skip_first_batches(loader, 2)
    for _batch in skipping:
        if skipping.end_of_dataloader:
            assert cursor_of(skipping)["ended"] == cursor_of(loader)["ended"] == 6


def test_a_program_may_set_the_epoch_before_it_skips_all_of_a_pass() -> None:
    (loader,) = build(samples=12, shuffle="seedable", stateful=False)
    for _batch in loader:
        if loader.end_of_dataloader:
            cursor = cursor_of(loader)
    (fresh,) = build(samples=12, shuffle="seedable", stateful=False)
    restore_cursor(fresh, cursor)
    fresh.set_epoch(0)
    assert list(skip_first_batches(fresh, 6)) == []
    assert fresh.iteration == 1
    assert gathered([fresh]) == gathered([loader])


@pytest.mark.parametrize("mode", ["stop", "error"])
def test_two_steps_that_were_read_ahead_are_drawn_as_they_were_before(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As within ``join_uneven_inputs``, whose loops know of the next step whether all processes have it."""

    def loader_of(seed: int) -> Any:
        torch.manual_seed(seed)
        loader = DataLoader(torch.arange(12), batch_size=2, shuffle=True, collate_fn=noisy)
        return prepare_data_loader(loader, torch.device("cpu"))

    monkeypatch.setattr(current.accumulation.reading, "on_uneven", mode)
    monkeypatch.setattr(tracked_loader, "world_size", lambda: 2)
    monkeypatch.setattr(tracked_loader, "_who_has", lambda has: [has, has])
    loader, whole = loader_of(0), []
    for batch in loader:
        whole.append((batch.tolist(), torch.rand(1).item()))
        if len(whole) == 2:
            (cursor, state), ahead = saved(loader), read_ahead_from(loader)
    assert len(ahead) == 2
    fresh = loader_of(9)
    restore_cursor(fresh, cursor)
    restore_read_ahead(fresh, ahead)
    torch.set_rng_state(state)
    assert after(skip_first_batches(fresh, 2)) == whole[2:]
