"""torchdata's ``StatefulDataLoader``, if it is installed, and its states, which the original's checkpoints contain."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_cpp.errors import InvalidArgument

State = dict[str, Any]

# The keys of torchdata's states.
_FINISHED, _YIELDED, _INDICES, _SNAPSHOT = "_iterator_finished", "_num_yielded", "_sampler_iter_yielded", "_snapshot"
_SINCE, _AT, _MAIN, _WORKERS = "_steps_since_snapshot", "_snapshot_step", "_main_snapshot", "_worker_snapshots"
_SAMPLER = "_sampler_iter_state"
_FETCHER, _DATASET, _DATASET_ITERATOR = "fetcher_state", "dataset_state", "dataset_iter_state"


def make(stateful: bool, dataset: Any, **options: Any) -> Any:
    """A torch ``DataLoader``; torchdata's if that is requested and installed."""
    loader_class: Any = _loader_class() if stateful else None
    if loader_class is None:
        return DataLoader(dataset, **options)
    if "in_order" not in inspect.signature(loader_class).parameters:  # before torchdata 0.11
        options.pop("in_order", None)
    return loader_class(dataset, **options)


def _loader_class() -> type[DataLoader[Any]] | None:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    found: type[DataLoader[Any]] = StatefulDataLoader
    return found


def is_torchdata(loader: Any) -> bool:
    """Whether ``loader``, as it is or wrapped, is torchdata's."""
    module: Any = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


def like(loader: Any, dataset: Any, **options: Any) -> Any:
    """A loader of the same class as ``loader`` over ``dataset``."""
    return make(is_torchdata(loader), dataset, **options)


def is_state(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is one of torchdata's loader."""
    return _FINISHED in state


def is_finished(state: State) -> bool:
    """Whether the pass of a torchdata ``state`` has ended, so that the next one starts from the beginning."""
    return bool(state[_FINISHED])


def batches_in(state: State) -> int:
    """The number of batches that the loader of a torchdata ``state`` has returned."""
    return int(state[_SNAPSHOT][_AT] + state[_SINCE] if _SNAPSHOT in state else state[_YIELDED])


def advanced(state: State, batches: int) -> State:
    """``state`` with so many more (or fewer) ``batches`` returned; workers keep no position in a map-style dataset."""
    if batches == 0:
        return state
    if _SNAPSHOT not in state:
        return {**state, _YIELDED: state[_YIELDED] + batches, _INDICES: state[_INDICES] + batches}
    snapshot = state[_SNAPSHOT]
    main = {**snapshot[_MAIN], _INDICES: snapshot[_MAIN][_INDICES] + batches}
    return {**state, _SNAPSHOT: {**snapshot, _AT: snapshot[_AT] + batches, _MAIN: main}}


def workers_of(state: State) -> int:
    """How many workers read for the loader of a torchdata ``state``, 0 if it read by itself."""
    return len(state[_SNAPSHOT][_WORKERS]) if _SNAPSHOT in state else 0


def check(state: State, loader: Any) -> None:
    """Raises ``InvalidArgument`` unless torchdata's ``loader``, with its number of workers, accepts ``state``."""
    workers = workers_of(state)
    if workers != loader.num_workers:
        raise InvalidArgument(
            f"the state of this loader is that of one with num_workers={workers}, and this one has "
            f"num_workers={loader.num_workers}: prepare it with the same number as before, or start the epoch again"
        )
    main = state[_SNAPSHOT][_MAIN] if _SNAPSHOT in state else state
    if main.get(_SAMPLER) is None and isinstance(loader.batch_sampler, _torchdata_sampler()):
        raise InvalidArgument(
            "the state of this loader lacks the state of its batch sampler (torchdata's): give the sampler that it was "
            "saved with to the loader before it is prepared, or start the epoch again"
        )


def _torchdata_sampler() -> type[Any]:
    from torchdata.stateful_dataloader.sampler import BatchSampler

    found: type[Any] = BatchSampler
    return found


def holds_dataset(state: State) -> bool:
    """Whether ``state`` contains the state of a dataset in addition to a position."""
    parts = state[_SNAPSHOT][_WORKERS].values() if _SNAPSHOT in state else [state]
    fetchers = [part.get(_FETCHER) or {} for part in parts if part]
    return any(part and part.get(_DATASET) is not None for part in parts) or any(
        fetcher.get(_DATASET_ITERATOR) is not None for fetcher in fetchers
    )


def check_needs_no_torchdata(state: State) -> None:
    """Raises ``InvalidArgument`` if ``state`` holds more than a position, which only torchdata can restore."""
    if holds_dataset(state):
        raise InvalidArgument(
            "the state of this loader holds the state of its dataset, which torchdata's StatefulDataLoader restores: "
            "pip install torchdata, or start the epoch again"
        )


def initial_state(loader: Any, generators: Iterable[torch.Generator]) -> State:
    """The state that torchdata's ``loader`` would restore at the start of a pass; the loader is not changed.

    To find out, workers are started, which read ahead: torch's generator, and ``generators``, get their states back.
    """
    before = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
    try:
        state: State = loader.state_dict()
    finally:
        forget(loader)
        for generator, kept in before:
            generator.set_state(kept)
    return state


def forget(loader: Any) -> None:
    """Makes torchdata's ``loader`` begin its next pass at the start, whatever it was to restore."""
    loader.load_state_dict({})
    loader.next_iter_state = None


def without_iterator(loader: Any) -> Any:
    """torchdata's ``loader`` without the iterator of its last pass, which cannot be copied; it restores the same."""
    other = copy.copy(loader)
    forget(other)
    other.next_iter_state = loader.next_iter_state
    return other


class Recorded:
    """The batches of a pass over a torchdata loader, with the loader's states between them.

    Batches are read ahead of those that were returned, so that the state to be saved is an earlier one.

    Args:
        batches: an iterator of the loader.
        taken: batches that precede the first one.
        uncounted: how many of these the loader does not know about.
    """

    def __init__(self, batches: Any, taken: int, uncounted: int) -> None:
        self._batches = batches
        self._taken = taken
        self._uncounted = uncounted
        self._states: dict[int, State] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._states[self._taken] = self._batches.state_dict()
        batch = next(self._batches)
        self._taken += 1
        return batch

    def __reduce__(self) -> Any:
        """A copy of a loader begins its own pass: it has ``None`` here."""
        return type(None), ()

    def after(self, batches: int, is_last: bool) -> State:
        """The state after ``batches`` were returned, all that there are if ``is_last``."""
        state = self._batches.state_dict() if is_last else self._states[batches]
        self._states = {count: kept for count, kept in self._states.items() if count >= batches}
        return {**advanced(state, self._uncounted), _FINISHED: is_last}
