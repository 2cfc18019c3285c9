"""Collectives on tensors of TensorFlow, differentiable, eager and in a ``tf.function``.

The rule of their gradients is that of ``torch.distributed.nn.functional``: what is differentiated is the sum of the
losses of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks import collectives, loading
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.tensorflow.host_calls import HostFunction, as_written, host_call

_LINEAR = ("sum", "mean")


@as_written
def all_reduce(tensors: Any, op: str = "sum") -> Any:
    """Each tensor reduced over the ranks, on every rank.

    Args:
        tensors: a tensor or a nest of them, with the same shapes and dtypes on all ranks.
        op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``; ``"mean"`` takes floating-point numbers only.

    Returns:
        New tensors in the same nest. Those of ``"sum"`` and ``"mean"`` are differentiable.

    Raises:
        InvalidArgument: another ``op``, or a mean of integers.
        PeerLost, MismatchedCollective, Timeout: from a graph, TensorFlow raises an error of its own with their text.

    Example:
        >>> from accelerate_cpp.tensorflow import all_reduce
        >>> all_reduce(tf.constant([1.0, 2.0])).numpy()
        array([1., 2.], dtype=float32)
    """
    collectives.check_operation(op, [])

    def backward(gradients: Sequence[Any]) -> Any:
        if op not in _LINEAR:
            raise InvalidArgument(f"all_reduce with op={op!r} has no gradient; use 'sum' or 'mean'")
        return all_reduce(list(gradients), op)

    return _exchanged(lambda views: collectives.all_reduce(views, op), backward, tensors, lambda spec: spec)


@as_written
def all_gather(tensors: Any) -> Any:
    """Each tensor of every rank, on every rank: shape ``(world_size, *shape)``, in the order of ranks. Differentiable.

    Args:
        tensors: a tensor or a nest of them, with the same shapes and dtypes on all ranks.

    Raises:
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import all_gather
        >>> all_gather(tf.constant([1.0, 2.0])).numpy()
        array([[1., 2.]], dtype=float32)
    """
    world_size = processes().world_size

    def backward(gradients: Sequence[Any]) -> Any:
        return [tf.squeeze(part, 0) for part in reduce_scatter(list(gradients))]

    def gathered(spec: Any) -> Any:
        return tf.TensorSpec(tf.TensorShape([world_size]).concatenate(spec.shape), spec.dtype)

    return _exchanged(collectives.all_gather, backward, tensors, gathered)


@as_written
def broadcast(tensors: Any, root: int = 0) -> Any:
    """Each tensor as rank ``root`` has it, on every rank. Differentiable.

    Args:
        tensors: a tensor or a nest of them, with the same shapes and dtypes on all ranks.

    Raises:
        InvalidArgument: ``root`` is no rank.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import broadcast
        >>> broadcast({"step": tf.constant(3)})["step"].numpy()
        np.int32(3)
    """
    place = processes()
    collectives.check_root(root, place.world_size)

    def backward(gradients: Sequence[Any]) -> Any:
        sums = all_reduce(list(gradients))
        return sums if place.rank == root else [tf.zeros_like(total) for total in sums]

    return _exchanged(lambda views: collectives.broadcast(views, root), backward, tensors, lambda spec: spec)


@as_written
def reduce_scatter(tensors: Any, op: str = "sum") -> Any:
    """This rank's part of each tensor reduced over the ranks: rows ``rank * n`` to ``(rank + 1) * n`` of
    ``world_size * n``.

    Args:
        tensors: a tensor or a nest of them, with the same shapes and dtypes on all ranks.
        op: as for :func:`all_reduce`.

    Raises:
        InvalidArgument: as :func:`all_reduce`; or a first dimension is no multiple of ``world_size``.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import reduce_scatter
        >>> reduce_scatter(tf.constant([1.0, 2.0])).numpy()
        array([1., 2.], dtype=float32)
    """
    collectives.check_operation(op, [])
    world_size = processes().world_size

    def backward(gradients: Sequence[Any]) -> Any:
        if op not in _LINEAR:
            raise InvalidArgument(f"reduce_scatter with op={op!r} has no gradient; use 'sum' or 'mean'")
        wholes = [tf.reshape(whole, tf.concat([[-1], tf.shape(whole)[2:]], 0)) for whole in all_gather(list(gradients))]
        return [whole / tf.cast(world_size, whole.dtype) for whole in wholes] if op == "mean" else wholes

    def scattered(spec: Any) -> Any:
        if spec.shape.rank is None or (spec.shape.rank > 0 and spec.shape[0] is None):
            return tf.TensorSpec(None, spec.dtype)
        collectives.check_divisible(spec.shape, world_size)
        return tf.TensorSpec([spec.shape[0] // world_size, *spec.shape[1:]], spec.dtype)

    return _exchanged(lambda views: collectives.reduce_scatter(views, op), backward, tensors, scattered)


@as_written
def barrier() -> None:
    """Returns when every rank has called it. In a ``tf.function``, its graph waits there.

    Raises:
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import barrier
        >>> barrier()
    """

    def wait(_: list[torch.Tensor]) -> list[torch.Tensor]:
        collectives.barrier()
        return []

    host_call(wait, [], [])


@as_written
def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Gives variables the values that they have on rank ``root``.

    Args:
        variables: of TensorFlow or Keras; all ranks pass as many, with the same shapes and dtypes.

    Raises:
        InvalidArgument: ``root`` is no rank.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import broadcast_variables
        >>> weight = tf.Variable([1.0, 2.0])
        >>> broadcast_variables([weight])
    """
    targets = list(variables)
    values = broadcast([tf.convert_to_tensor(variable) for variable in targets], root)
    for variable, value in zip(targets, values, strict=True):
        variable.assign(value)


@as_written
def gather_for_metrics(tensors: Any) -> Any:
    """Each tensor concatenated over the ranks along dimension 0, without samples that completed the last batch.

    Args:
        tensors: a tensor or a nest of them, computed from the batch of a :func:`data_loader` in whose loop this is
            called; with the same shapes and dtypes on all ranks. A scalar counts as one of shape ``(1,)``.

    Raises:
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.tensorflow import gather_for_metrics
        >>> gather_for_metrics(tf.constant([1, 2, 3])).numpy()
        array([1, 2, 3], dtype=int32)
    """
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    specs = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in flat]
    return tf.nest.pack_sequence_as(tensors, host_call(loading.gather_for_metrics, flat, specs))


def _exchanged(
    forward: HostFunction, backward: Callable[[Sequence[Any]], Any], tensors: Any, result_of: Callable[[Any], Any]
) -> Any:
    """``forward`` of all tensors of a nest in one call, with ``backward`` as the rule of its gradients."""
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    specs = [result_of(tf.TensorSpec(tensor.shape, tensor.dtype)) for tensor in flat]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
        return host_call(forward, inputs, specs), lambda *gradients: backward(gradients)

    return tf.nest.pack_sequence_as(tensors, exchange(*flat))
