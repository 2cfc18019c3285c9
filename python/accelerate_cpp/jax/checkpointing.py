"""Trees of JAX arrays in checkpoints: one file in the safetensors format, in a folder that is complete or not there."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks import tree_checkpoint
from accelerate_cpp.jax.arrays import as_array, as_tensor
from accelerate_cpp.jax.primitives import wait_for_programs

Tree = TypeVar("Tree")


def save_state(folder: str | os.PathLike[str], tree: Any) -> None:
    """Writes what rank 0 has as the checkpoint ``folder``; returns on all ranks when it is on the disk.

    A folder of that name is replaced in one step: whenever the program is killed, it is the old one or the new one.

    Args:
        folder: of the checkpoint.
        tree: a pytree of arrays and numbers, such as ``{"params": …, "opt_state": …, "step": 7}``. Of other ranks it is
            not looked at.

    Raises:
        InvalidArgument: an array that is traced, or of a dtype that the format lacks.
        SystemFailure: the disk is full, or the system refused something else.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from accelerate_cpp.jax import load_state, save_state
        >>> folder = tempfile.mkdtemp()
        >>> save_state(folder, {"w": jnp.ones(2), "step": 7})
        >>> load_state(folder, {"w": jnp.zeros(2), "step": 0})
        {'step': 7, 'w': Array([1., 1.], dtype=float32)}
    """
    wait_for_programs()
    tree_checkpoint.save(folder, lambda: {name: _saved(leaf) for name, leaf in _named(tree).items()})


def load_state(folder: str | os.PathLike[str], like: Tree) -> Tree:
    """The tree of the checkpoint ``folder``, on every rank, once its checksums are right.

    Args:
        like: a tree of the same structure with arrays of the same shapes and dtypes (or ``jax.ShapeDtypeStruct``), and
            numbers where numbers were saved. Where it has an array of NumPy, one of NumPy is returned.

    Raises:
        InvalidArgument: there is no such folder.
        CheckpointError: it is damaged, or of another tree; the message names the leaf.
        OtherRankFailed: on the ranks other than the one that failed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from accelerate_cpp.jax import load_state, save_state
        >>> folder = tempfile.mkdtemp()
        >>> save_state(folder, [jnp.arange(3)])
        >>> load_state(folder, [jnp.zeros(3, jnp.int32)])
        [Array([0, 1, 2], dtype=int32)]
    """
    named = _named(like)
    wait_for_programs()
    tensors = tree_checkpoint.load(folder, {name: _expected(leaf) for name, leaf in named.items()})
    leaves = [_loaded(tensors[name], leaf) for name, leaf in named.items()]
    loaded: Tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return loaded


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their paths: ``params/layers/0/w``.

    Raises:
        InvalidArgument: two paths have the same name, or there is no leaf.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        if name in named:
            raise InvalidArgument(f"two leaves of the tree are both named {name!r}: rename a key that contains '/'")
        named[name] = leaf
    if not named:
        raise InvalidArgument("expected a tree with arrays, found one without leaves")
    return named


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float))


def _is_numpy(leaf: Any) -> bool:
    """Whether it is of NumPy and of a dtype of NumPy's own."""
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.isbuiltin == 1 and leaf.dtype.kind in "biufc"


def _saved(leaf: Any) -> torch.Tensor:
    """Numbers and arrays of NumPy keep their 64 bits, whatever JAX does with them."""
    if _is_number(leaf):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    if _is_numpy(leaf):
        try:
            return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise InvalidArgument(f"an array of {leaf.dtype} cannot become a tensor of torch: {error}") from error
    if jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return as_tensor(leaf)


def _expected(leaf: Any) -> tree_checkpoint.Expected:
    if _is_number(leaf) or _is_numpy(leaf):
        saved = _saved(leaf)
        return tree_checkpoint.Expected(tuple(saved.shape), saved.dtype)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tree_checkpoint.Expected(tuple(leaf.shape), as_tensor(jnp.zeros((), leaf.dtype)).dtype)


def _loaded(tensor: torch.Tensor, like: Any) -> Any:
    if _is_number(like):
        return type(like)(tensor.item())
    # The tensor is mapped from the file, whose pages may go when another checkpoint replaces it: an array of its own.
    own = tensor.clone()
    if _is_numpy(like):
        return own.numpy() if isinstance(like, np.ndarray) else own.numpy()[()]
    array = as_array(own)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), like.dtype)))
    return array
