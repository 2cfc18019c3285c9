"""Prepared loaders that are torchdata's, beside the original's: the same states, and each continues the other's."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.state
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import accelerate_cpp
from accelerate_cpp.errors import InvalidArgument

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

PACKAGES = {"ours": accelerate_cpp, "original": accelerate}
SAMPLES, STEPS = 23, 8


class Stream(IterableDataset[int]):
    """Numbers, and the place of the next one, which depends on what each worker has read."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while first + self.next * step < SAMPLES:
            self.next += 1
            yield first + (self.next - 1) * step
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


pytestmark = pytest.mark.usefixtures("fresh_states")


def _reset_original() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(package: str, kind: str = "map", **config: Any) -> tuple[Any, Any]:
    _reset_original()
    torch.manual_seed(5)
    config = {"use_stateful_dataloader": True, "use_seedable_sampler": True} | config
    workers = config.pop("num_workers", 0)
    accelerator = PACKAGES[package].Accelerator(
        cpu=True, dataloader_config=PACKAGES[package].DataLoaderConfiguration(**config)
    )
    data: Any = Stream() if kind == "stream" else list(range(SAMPLES))
    shuffle = None if kind == "stream" else True
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=3, shuffle=shuffle, num_workers=workers))


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def stopped(accelerator: Any, loader: Any, steps: int, folder: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """Reads an epoch, and ``steps`` of the next; returns the state then, and what comes after it in that epoch."""
    read(loader)
    rest, state = [], {}
    for step, batch in enumerate(loader, start=1):
        if step > steps:
            rest.append(batch.tolist())
        elif step == steps:
            state = json.loads(json.dumps(loader.state_dict()))
            accelerator.save_state(str(folder))
    state.pop("_cursor", None)
    # It is drawn for each pass, and the original draws one more than are used, when a loader is prepared.
    state.get("_snapshot", {}).get("_main_snapshot", {}).pop("_base_seed", None)
    return state, rest


KINDS = [(kind, workers) for kind in ("map", "stream") for workers in (0, 2)]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dispatch", [None, True])
def test_a_prepared_loader_is_torchdatas(package: str, dispatch: bool | None) -> None:
    _, loader = prepared(package, dispatch_batches=dispatch)
    assert isinstance(loader, torchdata.StatefulDataLoader)
    assert isinstance(loader, DataLoader)
    assert loader.snapshot_every_n_steps == 1
    _, plain = prepared(package, use_stateful_dataloader=False)
    assert not isinstance(plain, torchdata.StatefulDataLoader)


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize(("kind", "workers"), KINDS)
@pytest.mark.parametrize("steps", [1, STEPS - 1, STEPS])
def test_states_are_those_of_the_original_and_each_continues_the_other(
    tmp_path: Path, kind: str, workers: int, steps: int, dispatch: bool | None
) -> None:
    options = {"kind": kind, "num_workers": workers, "dispatch_batches": dispatch}
    runs = {package: stopped(*prepared(package, **options), steps, tmp_path / package) for package in PACKAGES}
    assert runs["ours"] == runs["original"]
    for writer in PACKAGES:
        assert (tmp_path / writer / "dl_state_dict.bin").is_file()
        for reader in PACKAGES:
            accelerator, loader = prepared(reader, **options)
            accelerator.load_state(str(tmp_path / writer))
            loader.set_epoch(1)
            rest = runs[writer][1]
            found = read(loader)
            assert found == rest if rest else len(found) == STEPS, (writer, reader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_holds_the_state_of_the_dataset_after_what_is_out(tmp_path: Path, workers: int) -> None:
    _, loader = prepared("ours", "stream", num_workers=workers)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    state = copy.deepcopy(loader.state_dict())
    rest = read(batches)
    _, fresh = prepared("ours", "stream", num_workers=workers)
    fresh.load_state_dict(state)
    assert read(fresh) == rest
    assert sorted(sample for batch in seen + rest for sample in batch) == list(range(SAMPLES))
    assert len(read(fresh)) == len(seen + rest)


def test_the_rest_after_skipped_batches_has_the_state_of_its_place() -> None:
    accelerator, loader = prepared("ours")
    read(loader)
    batches = iter(accelerator.skip_first_batches(loader, 3))
    next(batches)
    state = copy.deepcopy(loader.state_dict())
    rest = read(batches)
    state.pop("_cursor")
    for package in PACKAGES:
        _, fresh = prepared(package)
        fresh.load_state_dict(state)
        fresh.set_epoch(1)
        assert read(fresh) == rest, package


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_not_read_has_the_state_of_the_start(workers: int) -> None:
    _, loader = prepared("ours", num_workers=workers)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = read(loader)
    for package in PACKAGES:
        _, fresh = prepared(package, num_workers=workers)
        fresh.load_state_dict(state)
        assert read(fresh) == expected


@pytest.mark.parametrize("installed", [True, False])
def test_what_was_loaded_and_not_read_can_be_saved_again(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    (_, loader), (_, second), (_, third) = (prepared("ours") for _ in range(3))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    second.load_state_dict(loader.state_dict())
    third.load_state_dict(second.state_dict())
    assert read(third) == read(batches)


def test_our_cursor_continues_where_there_are_other_workers_or_none_of_torchdata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, loader = prepared("ours", num_workers=2)
    read(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state, rest = copy.deepcopy(loader.state_dict()), read(batches)
    _, fresh = prepared("ours")
    fresh.load_state_dict(state)
    assert read(fresh) == rest
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    _, plain = prepared("ours", num_workers=1)
    assert not stateful_class(plain)
    plain.load_state_dict(state)
    assert read(plain) == rest
    cursor = plain.state_dict()
    monkeypatch.undo()
    _, again = prepared("ours")
    again.load_state_dict(cursor)
    assert read(again) == read(plain)


def stateful_class(loader: Any) -> bool:
    return isinstance(loader, torchdata.StatefulDataLoader)


def test_a_state_of_the_original_continues_without_torchdata_unless_it_holds_a_dataset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {kind: stopped(*prepared("original", kind), 3, tmp_path / kind) for kind in ("map", "stream")}
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    _, loader = prepared("ours")
    loader.load_state_dict(runs["map"][0])
    loader.set_epoch(1)
    assert read(loader) == runs["map"][1]
    with pytest.raises(InvalidArgument, match="pip install torchdata"):
        prepared("ours", "stream")[1].load_state_dict(runs["stream"][0])


def test_a_loader_of_torchdata_is_prepared_with_its_samplers() -> None:
    def loader(package: str = "ours") -> tuple[Any, Any]:
        accelerator, _ = prepared(package, use_seedable_sampler=False)
        torch.manual_seed(7)
        return accelerator, accelerator.prepare(torchdata.StatefulDataLoader(range(SAMPLES), 3, shuffle=True))

    for skipped in (0, 2):
        accelerator, first = loader()
        batches = iter(accelerator.skip_first_batches(first, skipped) if skipped else first)
        next(batches)
        state = copy.deepcopy(first.state_dict())
        _, fresh = loader()
        fresh.load_state_dict(state)
        assert read(fresh) == read(batches)


def test_a_state_for_other_workers_is_refused_where_nothing_else_tells_the_place(tmp_path: Path) -> None:
    state, _ = stopped(*prepared("original"), 3, tmp_path)
    _, loader = prepared("ours", num_workers=2)
    with pytest.raises(InvalidArgument, match="num_workers=0, and this one has num_workers=2"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_loader_that_was_read_can_be_copied(duplicate: Any) -> None:
    _, loader = prepared("ours")
    next(iter(loader))
    other = duplicate(loader)
    assert stateful_class(other)
    assert len(read(other)) == STEPS
    _, loaded = prepared("ours")
    loaded.load_state_dict(copy.deepcopy(loader.state_dict()))
    assert read(duplicate(loaded)) == read(loaded)
    assert len(read(loaded)) == STEPS
