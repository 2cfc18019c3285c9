"""Named variables in checkpoints: safetensors, in folders that are complete or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from accelerate_cpp.frameworks import tree_checkpoint
from accelerate_cpp.frameworks.tree_checkpoint import Expected
from accelerate_cpp.tensorflow.memory import to_tensorflow, to_torch


def save_state(folder: str | os.PathLike[str], variables: Mapping[str, Any]) -> None:
    """Writes rank 0's values as the checkpoint ``folder``. A collective: returns on all ranks when it is complete.

    A folder that exists is replaced in one step; if this fails or is killed at any moment, it is as it was.

    Args:
        variables: variables or tensors of numbers, by name. :func:`accelerate_cpp.keras.save_state` takes models.

    Raises:
        InvalidArgument: a dtype that the format lacks.
        SystemFailure: the disk is full, or the system refused something else.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> from accelerate_cpp.tensorflow import load_state, save_state
        >>> weight = tf.Variable([1.0, 2.0])
        >>> save_state("checkpoint", {"weight": weight})
        >>> weight.assign([0.0, 0.0]) is not None
        True
        >>> load_state("checkpoint", {"weight": weight})
        >>> weight.numpy()
        array([1., 2.], dtype=float32)
    """
    tree_checkpoint.save(folder, {name: to_torch(tf.convert_to_tensor(value)) for name, value in variables.items()})


def load_state(folder: str | os.PathLike[str], variables: Mapping[str, Any]) -> None:
    """Assigns the values of the checkpoint ``folder`` to variables, once its checksums are right. A collective.

    Args:
        variables: by the names under which they were saved, all of them, with their shapes and dtypes.

    Raises:
        InvalidArgument: there is no such folder.
        CheckpointError: the checkpoint is damaged or of other variables; the message names what is missing or differs.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> from accelerate_cpp.tensorflow import load_state, save_state
        >>> step = tf.Variable(7)
        >>> save_state("checkpoint", {"step": step})
        >>> load_state("checkpoint", {"step": step})
    """
    views = {name: to_torch(tf.convert_to_tensor(variable)) for name, variable in variables.items()}
    expected = {name: Expected(tuple(view.shape), view.dtype) for name, view in views.items()}
    for name, tensor in tree_checkpoint.load(folder, expected).items():
        variables[name].assign(to_tensorflow(tensor))
