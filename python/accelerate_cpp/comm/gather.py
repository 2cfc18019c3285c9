"""Gathering batches and objects with as few synchronisations of the processes as possible.

For small operands, the cost is the wait for the other processes, not the transport of bytes. So the first exchange
always has the same size: its buffer holds a head of 32 bytes and, if they fit, all operands. Only operands that do not
fit need a second exchange.

    head:  8 bytes  checksum of shapes and dtypes, or length of the pickled object
          24 bytes  name of the operation
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.comm.call_site import call_site, described
from accelerate_cpp.comm.single_tensors import all_gather_single
from accelerate_cpp.errors import MismatchedCollective

_HEAD = struct.Struct("=q24s")
_ROOM_BYTES = 8192 - _HEAD.size
# Larger tensors are gathered without a joint buffer: the copy into it would cost more than it saves.
_PACKED_BYTES = 1 << 16


def all_gather(tensors: Sequence[torch.Tensor], operation: str = "gather") -> list[torch.Tensor]:
    """Each tensor concatenated over the ranks of the default group along dimension 0.

    A 0-dim tensor counts as one of shape ``(1,)``. The inputs are not changed; results need no gradients.

    Raises:
        MismatchedCollective: on every rank: number, shapes, dtypes or ``operation`` (a name of up to 24 letters)
            differ; the message is a table.
    """
    parts = [tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach().contiguous() for tensor in tensors]
    wholes = list(parts)
    packs = _packed(parts)
    joined = [
        parts[pack[0]].view(-1) if len(pack) == 1 else torch.cat([parts[index].view(-1) for index in pack])
        for pack in packs
    ]
    for pack, gathered in zip(packs, _gather_agreed(operation, parts, joined), strict=True):
        lengths = [parts[index].numel() for index in pack]
        for index, piece in zip(pack, gathered.split(lengths, dim=1), strict=True):
            rows, *rest = parts[index].shape
            wholes[index] = piece.reshape(len(gathered) * rows, *rest)
    return wholes


def all_gather_object(item: Any, operation: str = "gather_object") -> list[Any]:
    """The picklable objects of all ranks of the default group, in rank order."""
    pickled = pickle.dumps(item)
    own = torch.frombuffer(bytearray(pickled), dtype=torch.uint8).to(_get_object_coll_device(dist.group.WORLD))
    fits = len(pickled) <= _ROOM_BYTES
    lengths, room = _meet(operation, len(pickled), [own] if fits else [], own.device, item=item)
    if max(lengths) > _ROOM_BYTES:
        room = _all_gather_each([torch.cat([own, own.new_zeros(max(lengths) - len(pickled))])])[0]
    rows = room.cpu().numpy()
    return [pickle.loads(row[:length].data) for row, length in zip(rows, lengths, strict=True)]


def _packed(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of the tensors; small ones of one device and dtype share a list. Long elements come first."""
    packs: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for index, part in enumerate(parts):
        alone = index if part.nbytes > _PACKED_BYTES else -1
        packs.setdefault((part.device, part.dtype, alone), []).append(index)
    return sorted(packs.values(), key=lambda pack: -parts[pack[0]].itemsize)


def _gather_agreed(operation: str, parts: list[torch.Tensor], joined: list[torch.Tensor]) -> list[torch.Tensor]:
    """``(size, length)`` for each of ``joined``, once all ranks are known to have the same ``parts``."""
    device = parts[0].device if parts else torch.device(_get_object_coll_device(dist.group.WORLD))
    fits = sum(one.nbytes for one in joined) <= _ROOM_BYTES and all(one.device == device for one in joined)
    signature = repr([(part.dtype, *part.shape) for part in parts])
    operands = [one.view(torch.uint8) for one in joined] if fits else []
    checksums, room = _meet(operation, zlib.crc32(signature.encode()), operands, device, item=parts)
    if len(set(checksums)) != 1:
        _raise_mismatch(operation, parts)
    if not fits:
        return _all_gather_each(joined)
    lengths = [one.nbytes for one in joined]
    pieces = room[:, : sum(lengths)].split(lengths, dim=1)
    return [piece.view(one.dtype) for one, piece in zip(joined, pieces, strict=True)]


def _meet(
    operation: str, number: int, operands: list[torch.Tensor], device: torch.device, item: Any
) -> tuple[list[int], torch.Tensor]:
    """The numbers of all ranks, and ``(size, _ROOM_BYTES)`` with their operands, which are bytes, side by side.

    ``item`` is what the caller gathers, for messages.
    """
    own = _HEAD.pack(number, operation.encode())
    head = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    rest = _ROOM_BYTES - sum(operand.numel() for operand in operands)
    met = _all_gather_each([torch.cat([head, *operands, head.new_zeros(rest)])])[0]
    heads = [_HEAD.unpack(row.tobytes()) for row in met[:, : _HEAD.size].cpu().numpy()]
    if len({name for _, name in heads}) != 1:
        _raise_mismatch(operation, item)
    return [number for number, _ in heads], met[:, _HEAD.size :]


def _raise_mismatch(operation: str, item: Any) -> NoReturn:
    """Called by all ranks: each has seen that they differ."""
    place = call_site().rpartition("\t")[2]
    calls = all_gather_object(f"{operation} of {described(item)} at {place}", operation="mismatch")
    rows = "".join(f"\n  rank {rank}: {call}" for rank, call in enumerate(calls))
    raise MismatchedCollective(
        f"{operation}: the ranks gather tensors of different structure, shape or dtype; where lengths differ, "
        f"pad_across_processes makes them equal{rows}"
    )


def _all_gather_each(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """``(size, length)`` for each of some vectors."""
    group = dist.group.WORLD
    assert group is not None
    wholes = [part.new_empty((group.size(), part.numel())) for part in parts]
    calls = []
    for device in dict.fromkeys(part.device for part in parts):
        own = [index for index, part in enumerate(parts) if part.device == device]
        outputs, inputs = [wholes[index].view(-1) for index in own], [parts[index] for index in own]
        if isinstance(group._get_backend(device), C10dBackend):
            calls.append(group.allgather_into_tensor_coalesced(outputs, inputs))
        else:  # Gloo's operation of this name mixes up what it gathers (torch 2.13)
            calls += [all_gather_single(*both, async_op=True) for both in zip(outputs, inputs, strict=True)]
    for call in calls:
        call.wait()
    return wholes
