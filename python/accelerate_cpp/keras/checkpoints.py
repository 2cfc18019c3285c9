"""Models of Keras in checkpoints: safetensors, in folders that are complete or not there."""

from __future__ import annotations

import os
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks import tree_checkpoint
from accelerate_cpp.frameworks.tree_checkpoint import Expected
from accelerate_cpp.keras.backends import assign, value_of


def save_state(folder: str | os.PathLike[str], model: Any) -> None:
    """Writes the weights and the state of the optimizer of rank 0 as the checkpoint ``folder``. A collective.

    It returns on all ranks when the checkpoint is complete. A folder that exists is replaced in one step; if this fails
    or is killed at any moment, it is as it was.

    Args:
        model: built, and compiled if the state of an optimizer is to be saved.

    Raises:
        InvalidArgument: the model is not built, or has a dtype that the format lacks.
        SystemFailure: the disk is full, or the system refused something else.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> import keras
        >>> from accelerate_cpp.keras import load_state, save_state
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> save_state("checkpoint", model)
        >>> load_state("checkpoint", model)
    """
    tree_checkpoint.save(folder, {name: value_of(variable) for name, variable in _named(model).items()})


def load_state(folder: str | os.PathLike[str], model: Any) -> None:
    """Gives ``model``, and its optimizer, what :func:`save_state` has written. A collective.

    Args:
        model: like the one that was saved: built, and compiled if that was. Layers may have other names: variables are
            told apart by their places.

    Raises:
        InvalidArgument: the model is not built, or there is no such folder.
        CheckpointError: the checkpoint is damaged or of another model; the message names what is missing or differs.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> import keras
        >>> from accelerate_cpp.keras import load_state, save_state
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> save_state("checkpoint", model)
        >>> load_state("checkpoint", model)
    """
    variables = _named(model)
    views = {name: value_of(variable) for name, variable in variables.items()}
    expected = {name: Expected(tuple(view.shape), view.dtype) for name, view in views.items()}
    for name, tensor in tree_checkpoint.load(folder, expected).items():
        assign(variables[name], tensor)


def _named(model: Any) -> dict[str, Any]:
    """The variables of ``model`` and its optimizer, by names that another object of the same model has, too."""
    if not model.built:
        raise InvalidArgument("the model is not built; call it on a batch first, or give it an Input")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    states = [] if optimizer is None else optimizer.variables
    named = {f"model/{number}/{variable.name}": variable for number, variable in enumerate(model.weights)}
    # Names of an optimizer's variables contain those of layers, which are counted through the whole program.
    return named | {f"optimizer/{number}": variable for number, variable in enumerate(states)}
