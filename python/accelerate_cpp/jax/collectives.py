"""Collectives on trees of JAX arrays, inside ``jit`` and outside."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.collectives import OPERATIONS, check_divisible, check_root
from accelerate_cpp.jax import primitives
from accelerate_cpp.jax.groups import group

Tree = TypeVar("Tree")


def all_reduce(tree: Tree, op: str = "sum") -> Tree:
    """Each array reduced over the ranks, on every rank.

    Inside ``jit`` it is part of the program. All ranks call the same collectives in the same order, with arrays of the
    same shapes and dtypes. ``"sum"`` and ``"mean"`` can be differentiated; the objective is then the sum of what all
    ranks differentiate, as with ``torch.distributed.nn.functional``, so that the transpose of a sum is a sum.

    Args:
        tree: a pytree of arrays; small ones of one dtype travel together.
        op: ``"sum"``, ``"mean"`` (of floating-point and complex numbers), ``"max"``, ``"min"`` or ``"product"``.

    Raises:
        InvalidArgument: another ``op``, a mean of integers, or a dtype that cannot be reduced so.
        PeerLost: a rank has died or left; the message has its number.
        MismatchedCollective: the ranks called different collectives, or with other shapes or dtypes.
        Timeout: a rank did not come in time. Inside ``jit`` these three are a ``jax.errors.JaxRuntimeError`` with the
            same text.

    Example:
        >>> import jax.numpy as jnp
        >>> from accelerate_cpp.jax import all_reduce, world_size
        >>> all_reduce({"ranks": jnp.ones(3)})["ranks"].tolist() == [world_size()] * 3
        True
    """
    leaves = _leaves(tree)
    _check_reduction(op, leaves)
    return _rebuilt(tree, _bound(primitives.all_reduce_p, leaves, op=op))


def all_gather(tree: Tree, tiled: bool = False) -> Tree:
    """Each array of every rank, on every rank, in the order of ranks; as ``jax.lax.all_gather``.

    Args:
        tree: a pytree of arrays of any dtype, with the same shapes on all ranks.
        tiled: concatenate along dimension 0; otherwise there is a new dimension 0 of ``world_size()``.

    Raises:
        InvalidArgument: ``tiled``, and an array has no dimension.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> import jax.numpy as jnp
        >>> from accelerate_cpp.jax import all_gather, rank, world_size
        >>> all_gather(jnp.asarray(rank())).tolist() == list(range(world_size()))
        True
    """
    leaves = _leaves(tree)
    for leaf in leaves:
        if tiled and leaf.ndim == 0:
            raise InvalidArgument("all_gather: tiled=True needs arrays with a dimension, found a scalar; leave it out")
    return _rebuilt(tree, _bound(primitives.all_gather_p, leaves, tiled=tiled))


def broadcast(tree: Tree, root: int = 0) -> Tree:
    """Each array as rank ``root`` has it, on every rank.

    Args:
        tree: a pytree of arrays of any dtype, with the same shapes on all ranks.
        root: a rank.

    Raises:
        InvalidArgument: ``root`` is no rank.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> import jax.numpy as jnp
        >>> from accelerate_cpp.jax import broadcast, rank
        >>> broadcast(jnp.full(2, rank())).tolist()
        [0, 0]
    """
    leaves = _leaves(tree)
    check_root(root, group().place.world_size)
    return _rebuilt(tree, _bound(primitives.broadcast_p, leaves, root=root))


def reduce_scatter(tree: Tree, op: str = "sum", tiled: bool = False) -> Tree:
    """This rank's part of each array reduced over the ranks; as ``jax.lax.psum_scatter``.

    Args:
        tree: a pytree of arrays with the same shapes on all ranks.
        op: as for :func:`all_reduce`.
        tiled: dimension 0 is divided by ``world_size()``; otherwise it is ``world_size()``, and is removed.

    Raises:
        InvalidArgument: as :func:`all_reduce`, or dimension 0 does not fit.
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> import jax.numpy as jnp
        >>> from accelerate_cpp.jax import rank, reduce_scatter, world_size
        >>> int(reduce_scatter(jnp.arange(world_size()))) == rank() * world_size()
        True
    """
    leaves = _leaves(tree)
    world_size = group().place.world_size
    _check_reduction(op, leaves)
    for leaf in leaves:
        if tiled:
            check_divisible(leaf.shape, world_size)
        elif leaf.ndim == 0 or leaf.shape[0] != world_size:
            raise InvalidArgument(
                f"reduce_scatter of shape {leaf.shape}: expected a dimension 0 of {world_size}, the number of "
                "processes, each of which gets a row; tiled=True divides a longer one"
            )
    return _rebuilt(tree, _bound(primitives.reduce_scatter_p, leaves, op=op, tiled=tiled))


def barrier() -> None:
    """Returns when every rank has called it; inside ``jit``, ranks wait for each other at this place of the program.

    Raises:
        PeerLost, MismatchedCollective, Timeout: as :func:`all_reduce`.

    Example:
        >>> from accelerate_cpp.jax import barrier
        >>> barrier()
    """
    _bound(primitives.barrier_p, [])


def _check_reduction(op: str, leaves: list[Any]) -> None:
    if op not in OPERATIONS:
        raise InvalidArgument(f"op={op!r}: expected {', '.join(map(repr, OPERATIONS))}")
    whole = next((leaf.dtype for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)), None)
    if op == "mean" and whole is not None:
        raise InvalidArgument(f"op='mean' of {whole}: expected floating-point numbers; convert them first, or sum")


def _leaves(tree: Any) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _bound(primitive: Any, leaves: list[Any], **params: Any) -> list[Any]:
    if not leaves and primitive is not primitives.barrier_p:
        return []
    ours = group()
    return primitives.bind(primitive, leaves, ours.number, ours.place.world_size, **params)


def _rebuilt(tree: Tree, leaves: list[Any]) -> Tree:
    rebuilt: Tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return rebuilt
