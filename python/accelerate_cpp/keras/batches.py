"""This rank's batches for ``model.fit``, with any backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelerate_cpp.frameworks.loading import Batches, loader_of, map_leaves


def data_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    split_batches: bool = False,
) -> Any:
    """This rank's batches of ``data``, for ``model.fit``, ``evaluate`` and ``predict``, which take loaders of torch.

    Batches go to the ranks in turn, and the last ones are completed with samples from the start, so that all ranks have
    as many.

    Args:
        data: inputs and targets, ``(x, y)`` or ``(x, y, sample_weight)``, of NumPy arrays that have the same length; or
            a ``DataLoader`` of torch over the whole data, which has its own batches and order.
        batch_size: rows in a batch of one process; with ``split_batches``, of all together.
        shuffle: in an order that depends on ``seed`` and the epoch alone.
        drop_last: leave out a last batch that is not full.
        split_batches: a batch is that of all ranks together, and is cut.

    Returns:
        A ``DataLoader`` of torch.

    Raises:
        InvalidArgument: arrays without ``batch_size``, or of different lengths.

    Example:
        >>> import numpy as np
        >>> from accelerate_cpp.keras import data_loader
        >>> len(data_loader((np.ones((8, 2)), np.arange(8)), batch_size=4))
        2
    """
    if not isinstance(data, DataLoader):
        data = map_leaves(lambda leaf: torch.as_tensor(np.asarray(leaf)), data)
    loader = loader_of(data, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return Batches(loader, lambda leaf: leaf, split_batches=split_batches, seed=seed).loader
