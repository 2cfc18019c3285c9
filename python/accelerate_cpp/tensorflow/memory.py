"""TensorFlow's tensors in host memory as tensors of torch, and the way back, without copies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch
from torch.utils.dlpack import to_dlpack

from accelerate_cpp.errors import InvalidArgument

_ALIGNMENT_BYTES = 64  # kernels of TensorFlow end the process on memory that begins elsewhere


def require_numbers(dtype: Any) -> None:
    """Checks that tensors of ``dtype`` can be handed over.

    Raises:
        InvalidArgument: they are strings, or something else that is not numbers; TensorFlow would end the process.
    """
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise InvalidArgument(
            f"a tensor of dtype {dtype.name}: expected numbers or booleans; encode it as numbers first"
        )


def to_torch(tensor: Any) -> torch.Tensor:
    """A view of the eager tensor ``tensor`` in host memory. TensorFlow takes it for constant: never write to it.

    Raises:
        InvalidArgument: as :func:`require_numbers`.
    """
    require_numbers(tensor.dtype)
    view: torch.Tensor = torch.from_dlpack(tensor)
    return view


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """An eager tensor with the memory of ``tensor``, which nobody writes to any more, or a copy."""
    whole = tensor.detach().contiguous()
    if whole.data_ptr() % _ALIGNMENT_BYTES:
        whole = whole.clone()
    return tf.experimental.dlpack.from_dlpack(to_dlpack(whole))
