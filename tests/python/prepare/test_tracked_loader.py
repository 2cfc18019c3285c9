"""What the state of a run knows of the loaders that it reads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import accelerate.data_loader as original
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader, prepare_data_loader
from accelerate_cpp.prepare.tracked_loader import DataLoaderStateMixin
from accelerate_cpp.runtime.gradient_state import GradientState
from accelerate_cpp.state import AcceleratorState, PartialState


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    GradientState._reset_state()
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(kind: str) -> Any:
    """A loader of 5 samples in batches of 2."""
    loader = DataLoader(range(5), batch_size=2)  # type: ignore[arg-type]
    if kind == "skipping":
        return SkipDataLoader(range(5), batch_size=2)
    return prepare_data_loader(loader, torch.device("cpu"), put_on_device=True, dispatch_batches=kind == "dispatcher")


KINDS = {"shard": DataLoaderShard, "dispatcher": DataLoaderDispatcher, "skipping": SkipDataLoader}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_begins_is_active_until_it_ends(kind: str) -> None:
    loader, state = prepared(kind), GradientState()
    assert type(loader) is KINDS[kind]
    loader.begin()
    assert state.active_dataloader is loader
    assert (state.end_of_dataloader, state.remainder) == (False, 1)
    loader.end_of_dataloader = True
    assert state.end_of_dataloader
    loader.end()
    assert not state.in_dataloader


def test_a_loader_that_ends_makes_the_one_around_it_active_again() -> None:
    outer, inner, state = prepared("shard"), prepared("shard"), GradientState()
    outer.begin()
    inner.begin()
    assert state.dataloader_references == [None, outer, inner]
    inner.end()
    assert state.active_dataloader is outer
    inner.end()  # once more changes nothing
    assert state.active_dataloader is outer


@pytest.mark.parametrize("kind", KINDS)
def test_beginning_knows_as_much_as_a_loop_does(kind: str) -> None:
    begun, looped = prepared(kind), prepared(kind)
    begun.begin()
    next(iter(looped))
    assert begun.remainder == looped.remainder == 1


def test_a_reset_forgets_the_last_batch() -> None:
    loader = prepared("shard")
    for _ in loader:
        pass
    assert (loader.end_of_dataloader, loader.remainder) == (True, 1)
    loader.reset()
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)


def test_a_loop_begins_and_ends_once_however_it_is_left() -> None:
    class Noting(DataLoaderShard):
        def begin(self) -> None:
            calls.append("begin")
            super().begin()

        def end(self) -> None:
            calls.append("end")
            super().end()

    calls: list[str] = []
    loader = Noting(range(5), batch_size=2)
    list(loader)
    for _ in loader:
        break
    with pytest.raises(KeyError):
        for _ in loader:
            raise KeyError
    assert calls == ["begin", "end"] * 3


def test_a_class_of_ones_own_can_tell_where_it_stands() -> None:
    class Own(DataLoaderStateMixin):
        pass

    own, state = Own(), GradientState()
    own.begin()
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (own, False, -1)
    own.end_of_dataloader, own.remainder = True, 3
    assert (state.end_of_dataloader, state.remainder) == (True, 3)
    own.end()
    assert state.active_dataloader is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_knows_the_state_and_still_pickles(kind: str) -> None:
    loader = prepared(kind)
    assert loader.gradient_state.active_dataloader is None
    loader.begin()
    assert loader.gradient_state.active_dataloader is loader
    copied = pickle.loads(pickle.dumps(loader))
    assert type(copied) is KINDS[kind]
    assert copied.gradient_state.active_dataloader is loader


def test_a_dispatcher_knows_the_processes_and_has_no_mesh() -> None:
    loader = prepared("dispatcher")
    assert isinstance(loader.state, PartialState)
    assert loader.state.num_processes == 1
    assert [loader.torch_device_mesh, loader.submesh_tp, loader.submesh_dp, loader.submesh_fsdp] == [None] * 4


@pytest.mark.parametrize("skipped", [0, 1, 2, 3, 5])
def test_a_skipping_loader_gives_what_the_originals_gives(skipped: int) -> None:
    ours, theirs = (
        kind(range(5), skip_batches=skipped, batch_size=2) for kind in (SkipDataLoader, original.SkipDataLoader)
    )
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    assert len(ours) == max(0, 3 - skipped)
