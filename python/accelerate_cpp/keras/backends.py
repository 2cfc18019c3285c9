"""What the three backends of Keras do differently: gradients averaged, values of variables read and set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks import averaging


def average(gradients: Sequence[Any]) -> list[Any]:
    """The mean over the ranks of each gradient of the backend in use; ``None`` where no rank has one."""
    return list(_chosen(_of_tensorflow, _of_torch, _of_jax)(gradients))


def _of_tensorflow(gradients: Sequence[Any]) -> Any:
    from accelerate_cpp.tensorflow import average_gradients  # a program of another backend need not have it

    return average_gradients(list(gradients))


def _of_torch(gradients: Sequence[Any]) -> Any:
    return averaging.average(gradients)


def _of_jax(gradients: Sequence[Any]) -> Any:
    from accelerate_cpp.jax import average_gradients

    return average_gradients(list(gradients))


def value_of(variable: Any) -> torch.Tensor:
    """What ``variable`` holds, in host memory, which is not to be written to."""
    view: torch.Tensor = _chosen(_from_tensorflow, _from_torch, _from_jax)(variable)
    return view


def _from_tensorflow(variable: Any) -> torch.Tensor:
    import tensorflow as tf

    from accelerate_cpp.tensorflow.memory import to_torch

    return to_torch(tf.convert_to_tensor(variable))


def _from_torch(variable: Any) -> torch.Tensor:
    value: torch.Tensor = variable.value.detach().cpu()
    return value


def _from_jax(variable: Any) -> torch.Tensor:
    view: torch.Tensor = torch.from_dlpack(variable.value)
    return view


def assign(variable: Any, value: torch.Tensor) -> None:
    """Gives ``variable`` the ``value``, whose memory nobody writes to any more."""
    variable.assign(_chosen(_to_tensorflow, _to_torch, _to_jax)(value))


def _to_tensorflow(value: torch.Tensor) -> Any:
    from accelerate_cpp.tensorflow.memory import to_tensorflow

    return to_tensorflow(value)


def _to_torch(value: torch.Tensor) -> Any:
    return value


def _to_jax(value: torch.Tensor) -> Any:
    import jax

    return jax.numpy.array(jax.dlpack.from_dlpack(value.contiguous()), copy=True)  # steps donate what variables hold


def _chosen(tensorflow: Callable[..., Any], torch: Callable[..., Any], jax: Callable[..., Any]) -> Callable[..., Any]:
    """The one for the backend in use."""
    by_name = {"tensorflow": tensorflow, "torch": torch, "jax": jax}
    name = keras.backend.backend()
    if name not in by_name:
        raise InvalidArgument(f"Keras uses the backend {name!r}: expected one of {', '.join(map(repr, by_name))}")
    return by_name[name]
