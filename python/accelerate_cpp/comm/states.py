"""States of optimizers and the like, from one process to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.utils._pytree import tree_map_only

# Smaller tensors travel with the rest of the state: a collective of its own costs more than its bytes.
_PICKLED_BYTES = 4096


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that is sent by itself."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast_state(state: Any, source: int) -> Any:
    """The nested ``state`` of rank ``source`` of the default group on all ranks. Collective.

    Everything in it that is no tensor is pickled, and so are small tensors, and those that are not on the device of the
    group's collectives, which arrive on the CPU.
    """
    device = torch.device(_get_object_coll_device(dist.group.WORLD))
    tensors: list[torch.Tensor] = []

    def packed(tensor: torch.Tensor) -> Any:
        if tensor.device.type != device.type or tensor.nbytes <= _PICKLED_BYTES:
            return tensor.detach().cpu()
        tensors.append(tensor.detach().contiguous())
        return _Sent(tensor.shape, tensor.dtype)

    def unpacked(sent: _Sent) -> torch.Tensor:
        tensor = next(own, None)
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=device) if tensor is None else tensor
        dist.broadcast(tensor, source)
        return tensor

    is_source = dist.get_rank() == source
    message = [tree_map_only(torch.Tensor, packed, state) if is_source else None]
    dist.broadcast_object_list(message, source)
    own = iter(tensors)
    return tree_map_only(_Sent, unpacked, message[0])
