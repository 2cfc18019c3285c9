"""How process 0, which reads for all, sends each process its rows.

Each step begins with a header of fixed size: what follows, whether it is the last batch, and the rows of the batches
that were read. The structure of a batch (containers, dtypes, shapes without rows) follows only when it has changed.
Rows are scattered, so that each process receives its own; a batch in which a tensor has another number of rows, or
which a custom function cuts, is broadcast as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.devices.tree import leaves_of, recursively_apply
from accelerate_cpp.errors import PeerLost

Read = tuple[Any, list[int], bool]
"""A global batch, the rows of each batch it is made of, and whether it is the last."""


class _Kind(IntEnum):
    SAME = 0
    NEW = 1
    END = 2
    FAILED = 3


@dataclass(frozen=True)
class _Leaf:
    """A tensor to receive: its shape, without rows if they are scattered."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _is_leaf(node: Any) -> bool:
    return isinstance(node, _Leaf)


@dataclass
class Step:
    """One global batch on its way: ``sizes`` are the rows of the batches that were read; only rank 0 has ``batch``."""

    sizes: list[int]
    is_last: bool
    scattered: bool
    structure: Any
    batch: Any


class Dispatch:
    """The exchange of one pass. All methods are collective over torch's default process group, if there is one.

    Args:
        reader: the batches that process 0 reads; ``None`` on other processes.
        device: where the batches of ``reader`` are, and where parts are received.
        scatters: whether rows may be scattered.
        places: of each process, which of the parts it gets; by default each another one.
    """

    def __init__(
        self,
        reader: Iterator[Read] | None,
        device: torch.device,
        scatters: bool,
        places: Sequence[int] | None = None,
    ) -> None:
        self._reader = reader
        self._device = device
        self._scatters = scatters
        self._world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._places = [*range(self._world_size)] if places is None else places
        self._structure: Any = None
        self._signature: Any = None
        self._scattered = False

    def next_step(self) -> Step | None:
        """Announces the next global batch, or ``None`` at the end.

        Raises:
            PeerLost: on the other processes, if reading failed on process 0, where the error itself is raised.
        """
        return self._hear() if self._reader is None else self._announce(self._reader)

    def part(self, step: Step, bounds: list[int], broadcast: Callable[[Any], Any]) -> Any:
        """The rows of this process's place if they are scattered: from ``bounds[place]`` on; else the whole batch.

        Args:
            broadcast: copies the tensors of process 0 to all processes, in place.
        """
        if not step.scattered:
            return broadcast(self._empty(step.structure, ()) if self._reader is None else step.batch)
        lengths = [stop - start for start, stop in pairwise(bounds)]
        length, longest = lengths[self._places[dist.get_rank()]], max(lengths)
        if self._reader is None:
            received = self._empty(step.structure, (longest,))
            recursively_apply(lambda mine: self._scatter(mine, None), received)
            return recursively_apply(lambda mine: mine[:length], received)

        def send(leaf: torch.Tensor) -> torch.Tensor:
            parts = [leaf[start : start + longest] for start in bounds[:-1]]
            parts = [_padded(part[:own], longest) for part, own in zip(parts, lengths, strict=True)]
            parts = [parts[place] for place in self._places]
            # Not a view of the global batch, which would keep all of it in memory as long as this part exists.
            mine = torch.empty_like(parts[0])
            self._scatter(mine, parts)
            return mine[:length]

        return recursively_apply(send, step.batch)

    def _announce(self, reader: Iterator[Read]) -> Step | None:
        try:
            read = next(reader, None)
            scattered = read is not None and self._scatters and _has_rows(read[0], _rows(read[0]))
            structure = None if read is None else _structure(read[0], scattered)
        except Exception as error:
            if self._world_size > 1:
                self._broadcast_header(_Kind.FAILED, False, [])
                dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=0)
            raise
        if read is None:
            self._broadcast_header(_Kind.END, False, [])
            return None
        batch, sizes, is_last = read
        if self._world_size == 1:
            return Step(sizes, is_last, False, structure, batch)
        signature = (scattered, _signature(structure))
        kind = _Kind.SAME if signature == self._signature else _Kind.NEW
        self._broadcast_header(kind, is_last, sizes)
        if kind is _Kind.NEW:
            dist.broadcast_object_list([(scattered, structure)], src=0)
            self._signature = signature
        return Step(sizes, is_last, scattered, structure, batch)

    def _hear(self) -> Step | None:
        header = torch.empty(3 + self._world_size, dtype=torch.int64, device=self._device)
        dist.broadcast(header, src=0)
        kind, is_last, count, *sizes = header.tolist()
        if kind == _Kind.END:
            return None
        if kind != _Kind.SAME:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0)
            if kind == _Kind.FAILED:
                raise PeerLost(
                    f"rank 0 failed while reading the next batch for all ranks: {message[0]}; "
                    "its traceback is on rank 0"
                )
            self._scattered, self._structure = message[0]
        return Step(sizes[:count], bool(is_last), self._scattered, self._structure, None)

    def _broadcast_header(self, kind: _Kind, is_last: bool, sizes: list[int]) -> None:
        if self._world_size == 1:
            return
        padding = [0] * (self._world_size - len(sizes))
        header = [int(kind), int(is_last), len(sizes), *sizes, *padding]
        dist.broadcast(torch.tensor(header, dtype=torch.int64, device=self._device), src=0)

    def _empty(self, structure: Any, rows: tuple[int, ...]) -> Any:
        def empty(leaf: _Leaf) -> torch.Tensor:
            return torch.empty((*rows, *leaf.shape), dtype=leaf.dtype, device=self._device)

        return recursively_apply(empty, structure, test_type=_is_leaf)

    def _scatter(self, mine: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        """Scatters a tensor as bytes: not every backend scatters every dtype."""
        if mine.numel() == 0:
            return
        sent = None if parts is None else [_bytes(part) for part in parts]
        dist.scatter(_bytes(mine), sent, src=0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    if len(part) == rows:
        return part.detach().resolve_conj().resolve_neg().contiguous()
    whole = part.new_empty((rows, *part.shape[1:]))
    whole[: len(part)] = part
    return whole


def _rows(data: Any) -> int:
    first = next(leaves_of(data), None)
    return len(first) if isinstance(first, torch.Tensor) and first.ndim > 0 else -1


def _has_rows(data: Any, rows: int) -> bool:
    """Whether every leaf of nested ``data`` is a plain tensor of ``rows`` rows."""
    return all(
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
        and leaf.ndim > 0
        and len(leaf) == rows
        for leaf in leaves_of(data)
    )


def _structure(data: Any, scattered: bool) -> Any:
    return recursively_apply(lambda leaf: _Leaf(tuple(leaf.shape[1:] if scattered else leaf.shape), leaf.dtype), data)


def _signature(structure: Any) -> Any:
    """A key that differs for different structures; a leaf that is not a tensor never equals another one."""
    if isinstance(structure, (tuple, list)):
        return type(structure), tuple(_signature(child) for child in structure)
    if isinstance(structure, Mapping):
        return type(structure), tuple((key, _signature(child)) for key, child in structure.items())
    return structure if isinstance(structure, _Leaf) else object()
