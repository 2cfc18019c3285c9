"""Arrays of JAX as tensors of torch and back, without copying where memory allows it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from accelerate_cpp.errors import InvalidArgument


def as_tensor(leaf: Any) -> torch.Tensor:
    """A tensor that views the memory of a CPU array, which may not be written to; numbers and NumPy arrays are copied.

    Raises:
        InvalidArgument: a value that is traced inside ``jit``, an array over several devices, or a dtype that torch
            lacks.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgument(
            "expected an array, found one that is traced: call this outside of jit, grad and vmap, or use the "
            "collectives, which work inside"
        )
    array = jnp.asarray(leaf)
    if len(array.devices()) > 1:
        raise InvalidArgument(
            f"expected an array on one device, found one over {len(array.devices())}: a process of this package has one"
        )
    try:
        tensor: torch.Tensor = torch.from_dlpack(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidArgument(f"an array of {array.dtype} cannot become a tensor of torch: {error}") from error
    return tensor


def as_array(leaf: Any) -> Any:
    """An array of JAX in the memory of a CPU tensor or a NumPy array, if that is contiguous and aligned to 64 bytes.

    Nobody may write to that memory afterwards. Other memory is copied; so are, without ``jax_enable_x64``, elements of
    64 bits, which become those of 32. Anything but tensors and arrays is returned as it is.
    """
    if isinstance(leaf, torch.Tensor):
        if leaf.dtype in (torch.int64, torch.float64, torch.complex128) and not jax.config.jax_enable_x64:
            return jnp.asarray(leaf.detach().numpy())
        return jnp.from_dlpack(leaf.detach().contiguous())
    if isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf)
    return leaf
