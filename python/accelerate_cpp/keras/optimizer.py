"""Optimizers of Keras that step on the gradients of all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.keras.backends import average


def DistributedOptimizer(optimizer: Any) -> Any:
    """Lets an optimizer of Keras 3 average gradients over the ranks; for ``model.compile`` and loops of one's own.

    Gradients are averaged in one call, after they were accumulated and before they are clipped. With backend
    ``tensorflow`` and ``torch`` only steps that update variables communicate. An optimizer that scales the loss
    averages before it looks whether gradients are finite, so that all ranks leave out the same steps.

    Args:
        optimizer: of class ``keras.optimizers.Optimizer``, built or not, or its name.

    Returns:
        The same object, of a class derived from its own. Files of models name the class that it had.

    Raises:
        InvalidArgument: it is no optimizer of Keras.

    Example:
        >>> import keras
        >>> from accelerate_cpp.keras import DistributedOptimizer
        >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3))
        >>> isinstance(optimizer, keras.optimizers.Adam)
        True
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgument(f"expected an optimizer of Keras 3, found {type(optimizer).__name__}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        if isinstance(inner, _AveragesGradients):
            inner.__class__ = inner._accelerate_plain
    if not is_distributed(optimizer):
        plain: type = type(optimizer)
        optimizer.__class__ = _distributed(plain)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether :func:`DistributedOptimizer` made it."""
    return isinstance(optimizer, (_AveragesGradients, _AveragesScaledGradients))


class _AveragesGradients:
    """The part of a derived class that averages what an optimizer is about to clip."""

    _accelerate_plain: type
    _accelerate_scaled = False

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "loss_scale_factor" and value is None:  # LossScaleOptimizer takes over the scale of what it wraps
            self._accelerate_scaled = True

    def _clip_gradients(self, grads: Any) -> Any:
        if self._accelerate_scaled:
            raise InvalidArgument(
                "a distributed optimizer is inside a LossScaleOptimizer, so ranks would leave out different steps; "
                "give the LossScaleOptimizer to DistributedOptimizer, or let AccelerateCallback() in model.fit do it"
            )
        return super()._clip_gradients(average(grads))  # type: ignore[misc]


class _AveragesScaledGradients:
    """The part of a derived class that averages before an optimizer looks whether gradients are finite."""

    _accelerate_plain: type

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply(average(grads), trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        return super().stateless_apply(  # type: ignore[misc]
            optimizer_variables, average(grads), trainable_variables
        )


@cache
def _distributed(plain: type) -> type:
    scales = issubclass(plain, keras.optimizers.LossScaleOptimizer)
    averages = _AveragesScaledGradients if scales else _AveragesGradients
    # Keras finds the class of a saved optimizer by these names.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    derived = type(plain.__name__, (averages, plain), {**names, "_accelerate_plain": plain})
    registered = keras.saving.get_registered_name(plain)
    if registered != plain.__name__:  # a class of the program, by register_keras_serializable
        package, _, name = registered.partition(">")
        keras.saving.register_keras_serializable(package, name)(derived)
        keras.saving.get_custom_objects()[registered] = plain
    return derived
