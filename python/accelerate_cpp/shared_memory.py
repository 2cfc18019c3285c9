"""Tensors in memory that the processes of one host share, on which collectives copy nothing.

Every collective over backend ``shm`` on an ordinary tensor copies it into shared memory and the result back. A tensor
made by the functions of this module lies in shared memory from the start. The collectives of :mod:`torch.distributed`
(``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` and ``all_gather_into_tensor``, ``reduce_scatter`` and
``reduce_scatter_tensor``, ``gather``, ``scatter``, ``all_to_all`` and their kin) then work on it where it is, when
all ranks pass such tensors, or contiguous views of them. Nothing else changes: it is an ordinary CPU tensor to
everything else, and groups of other backends take it, too. Small operands (below 8 KiB) are always copied through
staging memory, which is faster.

.. code-block:: python

    gradients = accelerate_cpp.shared_empty(25_000_000)
    torch.cat([parameter.grad.flatten() for parameter in model.parameters()], out=gradients)
    torch.distributed.all_reduce(gradients)

It resembles torch's symmetric memory (``torch.distributed._symmetric_memory.empty``), with these differences: making
a tensor is not collective, no rendezvous is needed, ranks need neither equal shapes nor equal offsets, and one tensor
serves every group of its process.

**Lifetime.** The memory belongs to the process that made it, not to a group, and is freed when the last tensor that
views it is; tensors below 1 MiB lie together in pieces of 4 MiB, each freed as a whole. It has no name in the file
system, so that nothing is left behind however the process ends, and it counts towards the memory limit of the
process's container.

**Fork.** A forked child sees the same memory: each process reads what the other writes, as after
:meth:`torch.Tensor.share_memory_`. A child cannot use the groups of its parent.

**Copies.** Pickling, ``copy.deepcopy``, ``clone`` and ``torch.save`` give ordinary tensors with the same values, and
so does sending one to another process with :mod:`torch.multiprocessing`, which moves the sender's tensor out of this
memory. Storages cannot be resized, so that ``resize_`` to a larger size and ``untyped_storage().resize_`` raise.

On platforms other than Linux, the tensors are in ordinary memory, and everything works with copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_cpp import _native
from accelerate_cpp.errors import InvalidArgument

__all__ = ["is_shared", "shared_empty", "shared_empty_like", "shared_full", "shared_tensor", "shared_zeros"]


def _shape(size: tuple[Any, ...]) -> list[int]:
    """``(2, 3)`` and ``([2, 3],)`` alike."""
    return [int(length) for length in (size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)]


def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor in shared memory; as ``torch.empty``. The module says more.

    Args:
        size: the lengths of its dimensions, one by one or as one sequence.
        dtype: any dtype of torch.
        requires_grad: whether autograd records operations on it.

    Raises:
        InvalidArgument: a length is negative, or there are more bytes than can be addressed.
        SystemFailure: there is not enough memory, within the limits of the container, say.

    Example:
        >>> import torch
        >>> from accelerate_cpp import is_shared, shared_empty
        >>> activations = shared_empty(4, 8, dtype=torch.bfloat16)
        >>> activations.shape, is_shared(activations)
        (torch.Size([4, 8]), True)
    """
    return _native.shared_empty(_shape(size), dtype).requires_grad_(requires_grad)


def shared_zeros(
    *size: int | Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> torch.Tensor:
    """A tensor of zeros in shared memory; as ``torch.zeros``.

    Arguments and errors are those of :func:`shared_empty`.

    Example:
        >>> from accelerate_cpp import shared_zeros
        >>> shared_zeros(3)
        tensor([0., 0., 0.])
    """
    return shared_empty(*size, dtype=dtype, requires_grad=requires_grad)  # fresh memory is zero


def shared_full(
    size: Sequence[int], fill_value: float | bool, *, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """A tensor with all elements equal to ``fill_value`` in shared memory; as ``torch.full``.

    Args:
        size: the lengths of its dimensions.
        fill_value: a number, or a bool.
        dtype: ``None`` takes that of ``torch.full``: bool, int64 or the default floating dtype, as the value has it.
        requires_grad: whether autograd records operations on it.

    Raises:
        InvalidArgument, SystemFailure: as :func:`shared_empty`.

    Example:
        >>> from accelerate_cpp import shared_full
        >>> shared_full((2,), 7.0)
        tensor([7., 7.])
    """
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    return _native.shared_empty(_shape((size,)), dtype).fill_(fill_value).requires_grad_(requires_grad)


def shared_empty_like(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """An uninitialised tensor in shared memory with the shape, and unless given the dtype, of ``tensor``.

    It is contiguous, whatever the strides of ``tensor`` are, and on the CPU.

    Raises:
        SystemFailure: there is not enough memory.

    Example:
        >>> import torch
        >>> from accelerate_cpp import shared_empty_like
        >>> shared_empty_like(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    return shared_empty(
        tuple(tensor.shape), dtype=tensor.dtype if dtype is None else dtype, requires_grad=requires_grad
    )


def shared_tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """A copy of ``data`` in shared memory; as ``torch.tensor``.

    Args:
        data: a tensor of any device and strides, an array, a number, or nested sequences of numbers.
        dtype: ``None`` keeps that of ``data``.
        requires_grad: whether autograd records operations on the copy, which has no history.

    Raises:
        InvalidArgument: the tensor is sparse.
        SystemFailure: there is not enough memory.

    Example:
        >>> from accelerate_cpp import shared_tensor
        >>> shared_tensor([1, 2, 3])
        tensor([1, 2, 3])
    """
    source = torch.as_tensor(data, dtype=dtype)
    if source.layout != torch.strided:
        raise InvalidArgument(
            f"shared tensors are dense, found one with layout {source.layout}; call .to_dense() first"
        )
    copy = _native.shared_empty(list(source.shape), source.dtype)
    copy.copy_(source.detach())
    return copy.requires_grad_(requires_grad)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or the one that it is a view of, was made by a function of this module.

    ``tensor.is_shared()`` is another question: whether :mod:`torch.multiprocessing` shares its storage.

    Example:
        >>> import torch
        >>> from accelerate_cpp import is_shared, shared_zeros
        >>> is_shared(shared_zeros(1)), is_shared(torch.zeros(1))
        (True, False)
    """
    return _native.is_shared_tensor(tensor)
