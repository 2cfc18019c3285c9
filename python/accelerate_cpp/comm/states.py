"""States of optimizers and the like, from one process to all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.utils._pytree import tree_map_only

from accelerate_cpp.errors import InvalidArgument

# Smaller tensors travel with the rest of the state: a collective of its own costs more than its bytes.
_PICKLED_BYTES = 4096


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that is sent by itself."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def broadcast_state(state: Any, source: int) -> Any:
    """The nested ``state`` of rank ``source`` of the default group on all ranks. Collective.

    Everything in it that is no tensor is pickled, and so are small tensors, and those that are not on the device of the
    group's collectives, which arrive on the CPU. Tensors that are dense keep their strides.

    Raises:
        InvalidArgument: on all ranks: something in it cannot be pickled.
    """
    device = torch.device(_get_object_coll_device(dist.group.WORLD))
    tensors: list[torch.Tensor] = []

    def packed(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.device.type != device.type or tensor.nbytes <= _PICKLED_BYTES:
            return tensor.cpu()
        tensors.append(tensor if _is_dense(tensor) else tensor.contiguous())
        return _Sent(tensor.shape, tensors[-1].stride(), tensor.dtype)

    def unpacked(sent: _Sent) -> torch.Tensor:
        own = next(sending, None)
        tensor = torch.empty_strided(sent.shape, sent.stride, dtype=sent.dtype, device=device) if own is None else own
        # As it lies in memory: not all backends take other strides.
        dist.broadcast(tensor.as_strided((tensor.numel(),), (1,)), source)
        return tensor

    message: list[Any] = [None, ""]
    if dist.get_rank() == source:
        try:
            message[0] = pickle.dumps(tree_map_only(torch.Tensor, packed, state))
        except Exception as error:
            message[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(message, source)
    if message[0] is None:
        raise InvalidArgument(f"a state that cannot be pickled ({message[1]})")
    sending = iter(tensors)
    return tree_map_only(_Sent, unpacked, pickle.loads(message[0]))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided ``tensor`` fill its memory without overlaps and gaps, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
