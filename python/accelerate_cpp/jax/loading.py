"""This rank's batches as arrays of JAX, and what all ranks computed from them."""

from __future__ import annotations

from typing import Any

import jax
from torch.utils.data import DataLoader

from accelerate_cpp.frameworks import loading
from accelerate_cpp.jax.arrays import as_array, as_tensor
from accelerate_cpp.jax.primitives import wait_for_programs


def data_loader(
    arrays: Any, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> loading.Batches:
    """A loader of this rank's batches of ``arrays``, in the memory of the arrays where that is possible.

    Batches go to the ranks in turn. Without ``drop_last``, the last ones are completed with rows from the start, so
    that all ranks have as many; :func:`gather_for_metrics` drops those.

    Args:
        arrays: a tree (lists, tuples, mappings) of NumPy arrays or CPU tensors of torch with the same number of rows.
        batch_size: rows in a batch of one process.
        shuffle: in an order that depends on ``seed`` and the epoch alone, and is the same for any number of processes.
        seed: of that order.
        drop_last: leave out a last round of batches that is not full.

    Returns:
        What gives batches as trees of JAX arrays, each pass over it once; with ``set_epoch``, ``len``, ``is_last`` and
        ``remainder``.

    Raises:
        InvalidArgument: arrays of different lengths, or ``batch_size`` is not positive.

    Example:
        >>> import numpy as np
        >>> from accelerate_cpp.jax import data_loader
        >>> loader = data_loader({"x": np.arange(6, dtype=np.int32)}, batch_size=2)
        >>> first = next(iter(loader))["x"].shape
        >>> first
        (2,)
    """
    rows = loading.loader_of_arrays(arrays, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return loading.Batches(rows, as_array)


def prepare(
    loader: DataLoader[Any], *, split_batches: bool = False, seed: int | None = None, even_batches: bool = True
) -> loading.Batches:
    """The same for a loader of torch: its batches of this rank, as arrays of JAX in the memory of its tensors.

    Args:
        loader: ``torch.utils.data.DataLoader`` over the whole data, with workers and a collate function as you like.
        split_batches: its batch is that of all processes together, and is cut.
        seed: of the order, if it shuffles; default: from rank 0's generator of torch.
        even_batches: complete the last batches, so that all ranks have as many.

    Example:
        >>> import torch
        >>> from accelerate_cpp.jax import prepare
        >>> loader = prepare(torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2))
        >>> next(iter(loader)).shape
        (2,)
    """
    return loading.Batches(loader, as_array, split_batches=split_batches, seed=seed, even_batches=even_batches)


def gather_for_metrics(tree: Any) -> Any:
    """Each array of all ranks concatenated along dimension 0, without rows that completed the last batch.

    Called inside a loop over a loader of :func:`data_loader` or :func:`prepare`, outside of ``jit``.

    Args:
        tree: a pytree of arrays with a row for each row of the batch, or scalars, which are gathered all.

    Raises:
        InvalidArgument: inside ``jit``.
        PeerLost, MismatchedCollective, Timeout: as :func:`accelerate_cpp.jax.all_reduce`.

    Example:
        >>> import numpy as np
        >>> from accelerate_cpp.jax import data_loader, gather_for_metrics
        >>> seen = [gather_for_metrics(batch) for batch in data_loader(np.arange(5, dtype=np.int32), batch_size=2)]
        >>> np.concatenate(seen).tolist()
        [0, 1, 2, 3, 4]
    """
    leaves, shape = jax.tree.flatten(tree)
    wait_for_programs()
    gathered = loading.gather_for_metrics([as_tensor(leaf) for leaf in leaves])
    return jax.tree.unflatten(shape, [as_array(leaf) for leaf in gathered])
