"""A wrapper of a torch ``DataLoader`` that extends it and is accepted in its place."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_cpp.data import loaders, stateful
from accelerate_cpp.data.cursor import (
    Progress,
    check_cursor,
    check_source,
    cursor_of,
    read_ahead_from,
    restore_cursor,
    restore_read_ahead,
    restore_source,
    source_of,
)
from accelerate_cpp.data.order import encoded, state_in_cursor
from accelerate_cpp.errors import InvalidArgument

_CURSOR = "_cursor"  # in a state of torchdata's loader
_AHEAD = "read_from_"  # and a number


def _rebuild(cls: type, attributes: dict[str, Any]) -> Any:
    loader: Any = object.__new__(cls)
    loader.__dict__.update(attributes)
    return loader


def _parts(state: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The state of torchdata's loader and our cursor in a loader's ``state``, if it has them."""
    if not stateful.is_state(state):
        return None, state
    return {name: value for name, value in state.items() if name != _CURSOR}, state.get(_CURSOR)


def _ahead_in(cursor: dict[str, Any] | None) -> list[torch.Tensor]:
    """The states with which a process had read ahead; ``InvalidArgument`` if one is none."""
    names = [name for name in cursor or {} if name.startswith(_AHEAD)]
    return [state for name in names if cursor and (state := state_in_cursor(cursor, name)) is not None]


class DataLoaderAdapter:
    """Wraps a torch ``DataLoader``, counts as one for ``isinstance``, and forwards all its attributes.

    ``end_of_dataloader`` is true exactly while the last batch is in use. ``remainder`` is the number of real samples in
    the last global batch: 0 if nothing was added to it, -1 if unknown or if incomplete batches are dropped.
    ``iteration`` counts complete passes. ``skip_batches`` are skipped at the start of each pass, ``skipped_steps``
    counts them and those that the sampler skips. ``progress`` is shared with loaders that ``skip_first_batches`` made
    of this one. ``num_processes`` share the data; ``dispatches`` says whether one of them reads for all.

    Args:
        use_stateful_dataloader: :meth:`load_state_dict` and a restored cursor continue inside a pass. Where torchdata
            is installed, its ``StatefulDataLoader`` is wrapped, which also keeps the states of datasets and workers.
    """

    device: torch.device | None = None
    dispatches = False

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        self.progress = Progress()
        self.base_dataloader = stateful.make(use_stateful_dataloader, dataset, batch_sampler=batch_sampler, **kwargs)
        shard = loaders.shard_of(self)
        self.num_processes = 1 if shard is None else shard.num_processes
        self.end_of_dataloader = False
        self.remainder = -1
        self.skip_batches = 0
        self.skipped_steps = 0
        self._drop_last = False

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def __reduce__(self) -> Any:
        attributes = self.__dict__.copy()
        if stateful.is_torchdata(self.base_dataloader):
            attributes["base_dataloader"] = stateful.without_iterator(self.base_dataloader)
        return _rebuild, (type(self), attributes)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)

    @property
    def iteration(self) -> int:
        """Complete passes so far, which is the epoch of the next one."""
        return self.progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.progress.epoch = epoch

    @property
    def batches_per_step(self) -> int:
        """The number of batches of the user's loader that all processes together use in one step."""
        shard = loaders.shard_of(self)
        return 1 if shard is None or shard.split_batches else shard.num_processes

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, for :meth:`load_state_dict`.

        With torchdata it is a state of its loader, which contains ours. Otherwise the state of process 0 is valid for
        all.
        """
        self._require_stateful("state_dict")
        cursor, source = cursor_of(self), source_of(self)
        if self.num_processes == 1:  # otherwise it is that of one of them
            cursor |= {f"{_AHEAD}{number}": encoded(state) for number, state in enumerate(read_ahead_from(self))}
        self.dl_state_dict: dict[str, Any] = {**cursor} if source is None else {**source, _CURSOR: cursor}
        self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    @property
    def has_own_state(self) -> bool:
        """Whether :meth:`state_dict` may differ between processes, as states of datasets and workers do."""
        return stateful.is_torchdata(self.base_dataloader) and not self.dispatches

    def adjust_state_dict_for_prefetch(self) -> None:
        """A hook for subclasses to change ``dl_state_dict`` before :meth:`state_dict` returns it.

        Nothing has to be adjusted: batches that were read ahead are not counted before they are returned.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next pass continue where :meth:`state_dict` was called, on any number of processes.

        A state of torchdata's loader, as the original saves it, is accepted on the same number of processes that saved
        it. Raises ``InvalidArgument`` for any other kind of state.
        """
        self.check_state_dict(state_dict)
        source, cursor = _parts(state_dict)
        if cursor is not None:
            restore_cursor(self, cursor)
        if source is not None:
            restore_source(self, source, cursor)
        restore_read_ahead(self, _ahead_in(cursor))

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises if :meth:`load_state_dict` would; changes nothing."""
        self._require_stateful("load_state_dict")
        source, cursor = _parts(state_dict)
        _ahead_in(cursor)
        if cursor is not None:
            check_cursor(self, cursor)
        if source is not None:
            check_source(self, source, cursor)

    def _require_stateful(self, method: str) -> None:
        if not self.use_stateful_dataloader:
            raise InvalidArgument(
                f"{method} of a loader that was prepared without use_stateful_dataloader=True; set it in "
                "DataLoaderConfiguration, or resume with skip_first_batches"
            )

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one step over all processes; ``None`` for batches of varying length."""
        size: int | None = getattr(self.base_dataloader.batch_sampler, "batch_size", self.base_dataloader.batch_size)
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all processes; ``TypeError`` if it has no length."""
        total: int | None = getattr(self.dataset, "total_length", None)
        return len(self.dataset) if total is None else total

    def _drops_incomplete(self) -> bool:
        return self._drop_last or any(getattr(sampler, "drop_last", False) for sampler in loaders.samplers_of(self))

    def _expected_remainder(self) -> int:
        return -1 if self._drops_incomplete() else loaders.expected_remainder(self, self.total_batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tells samplers and dataset the epoch of the next pass."""
        self.iteration = epoch
        for listener in (*loaders.samplers_of(self), self.dataset):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """The sampler of single indices, or ``None``."""
        return loaders.get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replaces the sampler of single indices."""
        loaders.replace_sampler(self, sampler)
