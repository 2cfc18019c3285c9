"""Gradients averaged over the ranks, all in one call."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf
import torch

from accelerate_cpp.frameworks import averaging, collectives
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.tensorflow.host_calls import as_written, host_call


@as_written
def average_gradients(gradients: Any, sources: Any = None) -> Any:
    """The mean over the ranks of each gradient, through buckets in shared memory; eager or in a ``tf.function``.

    Args:
        gradients: a nest of tensors, ``tf.IndexedSlices`` and ``None``, alike on all ranks; slices may have different
            numbers of rows. They stay slices: those of all ranks, divided by the number of ranks.
        sources: the variables that these are the gradients of, in the same nest. With them, an eager gradient that is
            ``None`` here and not on another rank counts as 0; without them, and in a graph, that is refused.

    Returns:
        New tensors and slices in the same nest; ``None`` where no rank has a gradient.

    Raises:
        InvalidArgument: a gradient of integers; or one that only some ranks have, as said.
        PeerLost, MismatchedCollective, Timeout: from a graph, TensorFlow raises an error of its own with their text.

    Example:
        >>> from accelerate_cpp.tensorflow import average_gradients
        >>> [mean, nothing] = average_gradients([tf.constant([1.0, 3.0]), None])
        >>> mean.numpy(), nothing
        (array([1., 3.], dtype=float32), None)
    """
    flat = tf.nest.flatten(gradients)
    sparse = [number for number, gradient in enumerate(flat) if isinstance(gradient, tf.IndexedSlices)]
    dense = [number for number, gradient in enumerate(flat) if number not in sparse]
    given = [number for number in dense if flat[number] is not None]
    inputs = [tf.convert_to_tensor(flat[number]) for number in given]
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
    for number in sparse:
        values, indices = flat[number].values, flat[number].indices
        inputs += [values, indices]
        specs += [tf.TensorSpec([None, *values.shape[1:]], values.dtype), tf.TensorSpec([None], indices.dtype)]
    eager = tf.executing_eagerly()
    of_none = _zeros_of(tf.nest.flatten(sources), dense) if sources is not None and eager else None
    filled: list[int] = []

    def averaged(views: list[torch.Tensor]) -> list[torch.Tensor]:
        present = dict(zip(given, views, strict=False))
        means = averaging.average([present.get(number) for number in dense], of_none)
        filled[:] = [number for number, mean in zip(dense, means, strict=True) if mean is not None]
        return [mean for mean in means if mean is not None] + _rows_of_all(views[len(given) :])

    results = host_call(averaged, inputs, specs)
    places = filled if eager else given
    merged: list[Any] = [None] * len(flat)
    for number, mean in zip(places, results, strict=False):
        merged[number] = mean
    rows = iter(results[len(places) :])
    for number in sparse:
        merged[number] = tf.IndexedSlices(next(rows), next(rows), flat[number].dense_shape)
    return tf.nest.pack_sequence_as(gradients, merged)


def _zeros_of(sources: list[Any], dense: list[int]) -> Callable[[int], torch.Tensor]:
    def zeros(index: int) -> torch.Tensor:
        source = sources[dense[index]]
        # A dtype has the same name in both.
        return torch.zeros(tuple(source.shape), dtype=getattr(torch, tf.as_dtype(source.dtype).name))

    return zeros


def _rows_of_all(values_and_indices: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of all ranks, values divided by the number of ranks; ranks may have different numbers of them."""
    if not values_and_indices:
        return []
    world_size = processes().world_size
    collectives.check_operation("mean", [tensor.dtype for tensor in values_and_indices[::2]])
    [lengths] = collectives.all_gather([torch.tensor([len(tensor) for tensor in values_and_indices])])
    padded = []
    for tensor, longest in zip(values_and_indices, lengths.max(dim=0).values.tolist(), strict=True):
        room = torch.zeros((longest, *tensor.shape[1:]), dtype=tensor.dtype)
        room[: len(tensor)] = tensor
        padded.append(room)
    rows = [
        torch.cat([part[:length] for part, length in zip(whole, lengths[:, place].tolist(), strict=True)])
        for place, whole in enumerate(collectives.all_gather(padded))
    ]
    return [tensor if place % 2 else tensor.div_(world_size) for place, tensor in enumerate(rows)]


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose gradients are the means over the ranks.

    Everything else is that of the tape: what it watches and records, ``reset``; ``jacobian`` is not averaged. As with
    the tape, gradients are taken after its ``with`` block, once unless it is persistent.

    Args:
        tape: a tape, new or one that has recorded already; ``None`` makes one.

    Example:
        >>> from accelerate_cpp.tensorflow import DistributedGradientTape
        >>> weight = tf.Variable(2.0)
        >>> with DistributedGradientTape() as tape:
        ...     loss = weight * weight
        >>> tape.gradient(loss, weight).numpy()
        np.float32(4.0)
    """

    def __init__(self, tape: Any = None) -> None:
        self.tape = tf.GradientTape() if tape is None else tape

    def __enter__(self) -> DistributedGradientTape:
        self.tape.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.tape.__exit__(kind, error, frames)

    def __getattr__(self, name: str) -> Any:
        if name == "tape":
            raise AttributeError(name)
        return getattr(self.tape, name)

    @as_written
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean over the ranks of ``tape.gradient(target, sources, …)``; arguments are those of the tape.

        Raises:
            InvalidArgument, PeerLost, MismatchedCollective, Timeout: as :func:`average_gradients`.
        """
        return average_gradients(self.tape.gradient(target, sources, *args, **kwargs), sources)
