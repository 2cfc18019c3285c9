"""TensorFlow's tensors in host memory as tensors of torch, and the way back, without copies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch
from torch.utils.dlpack import to_dlpack

_ALIGNMENT_BYTES = 64  # kernels of TensorFlow end the process on memory that begins elsewhere


def to_torch(tensor: Any) -> torch.Tensor:
    """A view of the eager tensor ``tensor`` in host memory. TensorFlow takes it for constant: never write to it."""
    view: torch.Tensor = torch.from_dlpack(tensor)
    return view


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """An eager tensor with the memory of ``tensor``, which nobody writes to any more, or a copy."""
    whole = tensor.detach().contiguous()
    if whole.data_ptr() % _ALIGNMENT_BYTES:
        whole = whole.clone()
    return tf.experimental.dlpack.from_dlpack(to_dlpack(whole))
