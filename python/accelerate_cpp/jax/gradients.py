"""What data parallelism asks of a program in JAX: equal parameters at the start, averaged gradients in each step."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.jax.collectives import all_reduce, broadcast

Tree = TypeVar("Tree")


def average_gradients(gradients: Tree) -> Tree:
    """The mean over the ranks of each gradient, inside ``jit`` and outside.

    One call takes all of them: small gradients of one dtype travel together, large ones are averaged where they lie.
    Inside ``jit``, gradients that are not used otherwise are replaced in their own memory.

    Args:
        gradients: a pytree of arrays of floating-point dtypes, in any mixture; of the same structure, shapes and dtypes
            on all ranks. ``None`` has no leaves, so one that a rank lacks and another has is a mismatch.

    Raises:
        InvalidArgument: a gradient of integers.
        PeerLost, MismatchedCollective, Timeout: as :func:`accelerate_cpp.jax.all_reduce`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from accelerate_cpp.jax import average_gradients
        >>> gradients = jax.grad(lambda weights: (weights["w"] ** 2).sum())({"w": jnp.ones(2)})
        >>> average_gradients(gradients)["w"].tolist()
        [2.0, 2.0]
    """
    whole = [
        (jax.tree_util.keystr(path), jnp.result_type(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if whole:
        name, dtype = whole[0]
        raise InvalidArgument(
            f"average_gradients: gradients{name} is of {dtype}; expected floating-point numbers: leave what is not "
            "trained out of the tree"
        )
    return all_reduce(gradients, "mean")


def broadcast_parameters(parameters: Tree) -> Tree:
    """The parameters of rank 0, on every rank; call it once, before the first step.

    Args:
        parameters: a pytree of arrays of any dtype, such as parameters or the state of an optimizer; with the same
            structure and shapes on all ranks.

    Raises:
        PeerLost, MismatchedCollective, Timeout: as :func:`accelerate_cpp.jax.all_reduce`.

    Example:
        >>> import jax.numpy as jnp
        >>> from accelerate_cpp.jax import broadcast_parameters, rank
        >>> broadcast_parameters({"bias": jnp.full(2, float(rank()))})["bias"].tolist()
        [0.0, 0.0]
    """
    return broadcast(parameters, root=0)
