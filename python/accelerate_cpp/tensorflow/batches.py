"""This rank's batches: from arrays and loaders of torch, and from datasets of ``tf.data``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.loading import Batches, loader_of
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.tensorflow.memory import to_tensorflow


def data_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    split_batches: bool = False,
) -> Batches:
    """This rank's batches of ``data`` as tensors of TensorFlow; one pass for each iteration.

    Batches go to the ranks in turn, and the last ones are completed with samples from the start, so that all ranks have
    as many; :func:`gather_for_metrics` drops those. ``set_epoch``, ``len`` and ``is_last`` are those of
    :class:`accelerate_cpp.frameworks.loading.Batches`.

    Args:
        data: a nest of NumPy arrays that have the same length; or a ``DataLoader`` of torch over the whole data, which
            has its own batches and order.
        batch_size: rows in a batch of one process; with ``split_batches``, of all together.
        shuffle: in an order that depends on ``seed`` and the epoch alone.
        drop_last: leave out a last batch that is not full.
        split_batches: a batch is that of all ranks together, and is cut.

    Raises:
        InvalidArgument: arrays without ``batch_size``, or of different lengths.

    Example:
        >>> import numpy as np
        >>> from accelerate_cpp.tensorflow import data_loader
        >>> [(images, labels)] = data_loader((np.ones((4, 2)), np.arange(4)), batch_size=4)
        >>> images.shape, labels.numpy()
        (TensorShape([4, 2]), array([0, 1, 2, 3]))
    """
    loader = loader_of(data, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return Batches(loader, _to_tensor, split_batches=split_batches, seed=seed)


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return to_tensorflow(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "bifc" and leaf.flags.writeable and leaf.flags.c_contiguous:
        return to_tensorflow(torch.from_numpy(leaf))
    return tf.convert_to_tensor(leaf)


def shard_dataset(dataset: Any, batch_size: int, *, drop_remainder: bool = False) -> Any:
    """This rank's batches of a ``tf.data.Dataset`` of samples, as many on all ranks, for loops and ``model.fit``.

    What the ranks take in a step is what one process takes with batches of ``batch_size * world_size``: sample ``i``
    goes to rank ``i % world_size``. The last step is completed with samples from the start.

    Args:
        dataset: samples, not batches, in the same order on all ranks: give ``shuffle`` a seed.
        batch_size: samples in a batch of one process.
        drop_remainder: leave out what does not fill a step on all ranks. Needed where TensorFlow does not know how many
            samples there are.

    Raises:
        InvalidArgument: ``batch_size`` is not positive; the dataset is empty, or of unknown length without
            ``drop_remainder``.

    Example:
        >>> from accelerate_cpp.tensorflow import shard_dataset
        >>> [list(batch.numpy()) for batch in shard_dataset(tf.data.Dataset.range(5), 2)]
        [[np.int64(0), np.int64(1)], [np.int64(2), np.int64(3)], [np.int64(4), np.int64(0)]]
    """
    place = processes()
    if batch_size < 1:
        raise InvalidArgument(f"batch_size={batch_size}: expected at least 1")
    step = batch_size * place.world_size
    length = int(dataset.cardinality())
    if length == int(tf.data.UNKNOWN_CARDINALITY):
        if not drop_remainder:
            raise InvalidArgument(
                "shard_dataset: the length of the dataset is unknown, so ranks may get different numbers of batches; "
                "pass drop_remainder=True, or tell it with tf.data.experimental.assert_cardinality"
            )
        whole = dataset.batch(step, drop_remainder=True)
        # What map passes on as several arguments would be a plain tuple.
        return whole.map(
            lambda *rows: tf.nest.pack_sequence_as(
                whole.element_spec, [row[place.rank :: place.world_size] for row in tf.nest.flatten(rows)]
            )
        ).prefetch(tf.data.AUTOTUNE)
    if length == 0:
        raise InvalidArgument("shard_dataset: the dataset has no samples; expected at least one")
    if length > 0:
        steps = length // step if drop_remainder else -(-length // step)
        dataset = dataset.repeat(-(-steps * step // length)).take(steps * step)
    shard = dataset.shard(place.world_size, place.rank)
    return shard.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
