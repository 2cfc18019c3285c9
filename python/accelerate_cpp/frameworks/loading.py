"""This rank's batches, as another framework wants them, from a loader of torch or from arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from accelerate_cpp.data.samplers import SeedableRandomSampler
from accelerate_cpp.data_loader import prepare_data_loader
from accelerate_cpp.devices.tree import honor_type, leaves_of, rebuild_mapping
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.collectives import all_gather
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.prepare.metrics import rows_of_last_batch
from accelerate_cpp.runtime.gradient_state import GradientState


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree``, lists, tuples and mappings, with ``function(leaf)`` in place of each leaf."""
    if isinstance(tree, (list, tuple)):
        return honor_type(tree, (map_leaves(function, child) for child in tree))
    if isinstance(tree, Mapping):
        return rebuild_mapping(tree, {key: map_leaves(function, child) for key, child in tree.items()})
    return function(tree)


class Rows(Dataset[Any]):
    """The rows of arrays, by lists of their numbers.

    Args:
        arrays: a tree of NumPy arrays or CPU tensors that all have the same length.

    Raises:
        InvalidArgument: there is no array, one has no rows, or lengths differ.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = map_leaves(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else np.asarray(leaf), arrays)
        shapes = [tuple(leaf.shape) for leaf in leaves_of(self._arrays)]
        lengths = {shape[0] if shape else -1 for shape in shapes}
        if len(lengths) != 1 or -1 in lengths:
            raise InvalidArgument(f"expected arrays with the same number of rows, found the shapes {shapes}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: Sequence[int]) -> Any:
        """The rows: a view of the arrays where they follow each other, else a copy."""
        first, last = rows[0], rows[-1]
        if list(rows) == list(range(first, last + 1)):
            return map_leaves(lambda leaf: leaf[first : last + 1], self._arrays)
        numbers = torch.as_tensor(rows)
        return map_leaves(
            lambda leaf: leaf[numbers] if isinstance(leaf, torch.Tensor) else _taken(leaf, numbers), self._arrays
        )


def _taken(array: np.ndarray[Any, Any], rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Into memory of torch, which begins where other frameworks need not copy it."""
    room = torch.empty(len(rows) * array[:1].nbytes, dtype=torch.uint8).numpy()
    taken: np.ndarray[Any, Any] = room.view(array.dtype).reshape(len(rows), *array.shape[1:])
    return np.take(array, rows.numpy(), axis=0, out=taken, mode="clip")


def _as_it_is(batch: Any) -> Any:
    return batch


def loader_of_arrays(
    arrays: Any, *, batch_size: int, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> DataLoader[Any]:
    """A loader of torch over all rows of ``arrays``, for :class:`Batches`.

    Args:
        arrays: a tree of NumPy arrays or CPU tensors that all have the same length.
        batch_size: rows in a batch of one process.
        shuffle: in an order that depends on ``seed`` and the epoch alone.

    Raises:
        InvalidArgument: arrays of different lengths, or ``batch_size`` is not positive.
    """
    if batch_size < 1:
        raise InvalidArgument(f"batch_size={batch_size}: expected at least 1")
    rows = Rows(arrays)
    order: Sampler[int] = SeedableRandomSampler(rows, data_seed=seed) if shuffle else SequentialSampler(rows)
    return DataLoader(rows, sampler=BatchSampler(order, batch_size, drop_last), batch_size=None, collate_fn=_as_it_is)


def loader_of(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """``data`` if it is a loader of torch, which has its own batches and order; else a loader of its arrays.

    Args:
        data: a ``DataLoader``, or what :func:`loader_of_arrays` takes, as are the other arguments.

    Raises:
        InvalidArgument: arrays without ``batch_size``, or of different lengths.
    """
    if isinstance(data, DataLoader):
        return data
    if batch_size is None:
        raise InvalidArgument("data_loader: expected batch_size for arrays; only a DataLoader of torch has its own")
    return loader_of_arrays(data, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


class Batches:
    """This rank's batches of a loader, converted; one pass for each iteration.

    As with ``Accelerator.prepare``, batches go to the ranks in turn, and the last ones are completed with samples from
    the start, so that all ranks have as many; :func:`gather_for_metrics` drops those.

    Args:
        loader: torch's, over the whole data.
        convert: called with each leaf of a batch, a tensor, an array or whatever the loader gives.
        split_batches: the loader's batch is that of all ranks together, and is cut.
        seed: the order of a loader that shuffles depends on it and the epoch; ``None`` takes rank 0's generator of
            torch.
        even_batches: complete the last batches; otherwise some ranks may have one batch less.

    Attributes:
        loader: the prepared loader of torch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        convert: Callable[[Any], Any],
        *,
        split_batches: bool = False,
        seed: int | None = None,
        even_batches: bool = True,
    ) -> None:
        place = processes()
        self._convert = convert
        self.loader: Any = prepare_data_loader(
            loader,
            num_processes=place.world_size,
            process_index=place.rank,
            split_batches=split_batches,
            even_batches=even_batches,
            use_seedable_sampler=not isinstance(loader.dataset, Rows),
            data_seed=seed,
            rng_types=[],
        )

    def __len__(self) -> int:
        """The number of batches of this rank in a pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield map_leaves(self._convert, batch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; without it, each pass has the one that follows."""
        self.loader.set_epoch(epoch)

    @property
    def is_last(self) -> bool:
        """Whether the batch in use is the last one of its pass."""
        return bool(self.loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """With the last batch: how many samples of all ranks' last batches are real; 0 if all are, -1 if unknown."""
        return int(self.loader.remainder)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one step over all ranks; ``None`` for batches of varying length."""
        size: int | None = self.loader.total_batch_size
        return size


def gather_for_metrics(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor concatenated over the ranks along dimension 0, without samples that completed the last batch.

    A 0-dim tensor counts as one of shape ``(1,)``, of which nothing is dropped. The loop over :class:`Batches` that
    this is called in says which batch is the last.
    """
    wholes = all_gather([tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors])
    joined = [whole.reshape(whole.shape[0] * whole.shape[1], *whole.shape[2:]) for whole in wholes]
    rows = rows_of_last_batch(GradientState(), processes().world_size)
    if rows is None:
        return joined
    lengths, real = rows
    return [
        whole[:real] if part.ndim > 0 and len(whole) in lengths else whole
        for whole, part in zip(joined, tensors, strict=True)
    ]
