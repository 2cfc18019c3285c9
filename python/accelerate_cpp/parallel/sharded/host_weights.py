"""Weights once per host: the whole weights lie in memory that all processes of a host have mapped.

What a process steps on is a slice of them, so that nothing has to be gathered before a layer computes; between hosts
only slices travel, once per step. Where layers compute in another precision than the one that is stepped on, the memory
holds the weights in that precision, and the slices are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from accelerate_cpp.comm.host_group import HostGroup
from accelerate_cpp.devices.shards import inner_tensor, rows_of_rank

_ALIGNMENT = 64


class HostWeights:
    """The whole weights of one model. Construction is a collective of the processes that share them out.

    Of each weight, every process has as many rows as ``torch.chunk`` gives it.

    Args:
        host: which of these processes share this host.
        kinds: the shape and the dtype of each weight, alike on all processes.

    Attributes:
        wholes: the weights: zeros, each with a storage of its own.
    """

    def __init__(self, host: HostGroup, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self._host = host
        self._size = dist.get_world_size(host.group)
        places, total = [], 0
        for shape, dtype in kinds:
            size_bytes = shape.numel() * dtype.itemsize
            places.append((total, size_bytes))
            total += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        window = host.window(max(total, 1))
        self.wholes = [
            _with_own_storage(window[begin : begin + size_bytes], dtype).view(shape)
            for (begin, size_bytes), (shape, dtype) in zip(places, kinds, strict=True)
        ]
        self._shards: list[torch.Tensor] = list(self.wholes)
        self._parameters: list[torch.Tensor] = []
        self._published: list[int] = []  # the versions of the parameters

    def slice_of(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The rows of ``whole`` that ``rank``, or this process, steps on."""
        return rows_of_rank(whole, self._host.rank if rank is None else rank, self._size)

    def place(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Takes in the values of this process's ``rows`` of a weight.

        Returns:
            What is to be stepped on: the rows in the common memory, or ``rows`` themselves if their dtype is another.
        """
        whole = self.wholes[index]
        if rows.dtype == whole.dtype:
            own = self.slice_of(whole).detach()
            with torch.no_grad():
                own.copy_(rows)
            rows = own
        self._shards[index] = rows
        return rows

    def are_stepped_by(self, parameters: Iterable[torch.Tensor]) -> None:
        """Says which parameters hold the rows of this process."""
        self._parameters = list(parameters)

    def hold_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``parameters``, which may be the plain tensors inside of sharded ones, holds their rows."""
        own = {id(one) for parameter in self._parameters for one in (parameter, inner_tensor(parameter))}
        return any(id(one) in own for one in parameters)

    def await_readers(self) -> None:
        """Returns when no process of this host computes with the weights any more. To be called before rows change."""
        self._host.barrier()

    def publish_changes(self) -> None:
        """As :meth:`publish`, if the program has changed rows itself; it does so on all processes alike."""
        if self._published != self._versions():
            self.publish()

    def _versions(self) -> list[int]:
        return [one._version for one in self._parameters]

    def publish(self) -> None:
        """Brings the rows, which have changed on all processes, to where all compute with them."""
        with torch.no_grad():
            copied = [
                (self.slice_of(whole), shard)
                for shard, whole in zip(self._shards, self.wholes, strict=True)
                if shard.dtype != whole.dtype
            ]
            if copied:
                torch._foreach_copy_([row for row, _ in copied], [shard for _, shard in copied])
            if len(self._host.hosts) > 1:
                for dtype in dict.fromkeys(whole.dtype for whole in self.wholes):
                    self._exchange([whole for whole in self.wholes if whole.dtype == dtype])
        self._published = self._versions()
        self._host.barrier()

    def _exchange(self, wholes: Sequence[torch.Tensor]) -> None:
        """Sends rows of this process to one of every other host, and takes in what comes from there."""
        host = self._host
        own = torch.cat([self.slice_of(whole).reshape(-1) for whole in wholes])
        calls, arriving = [], []
        for rank in range(self._size):
            if host.receiver(rank) == host.rank:
                rows = [self.slice_of(whole, rank) for whole in wholes]
                buffer = own.new_empty(sum(part.numel() for part in rows))
                arriving.append((buffer, rows))
                calls.append(dist.P2POp(dist.irecv, buffer, group=host.group, group_peer=rank))
        for index, ranks in enumerate(host.hosts):
            if index != host.host:
                receiver = ranks[host.ranks.index(host.rank) % len(ranks)]
                calls.append(dist.P2POp(dist.isend, own, group=host.group, group_peer=receiver))
        for call in dist.batch_isend_irecv(calls):
            call.wait()
        for buffer, rows in arriving:
            for part, piece in zip(rows, buffer.split([part.numel() for part in rows]), strict=True):
                part.copy_(piece.view(part.shape))


def _with_own_storage(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same memory, as a tensor whose storage begins there: ``fully_shard`` counts from the storage's beginning."""
    return torch.frombuffer(memory.numpy(), dtype=dtype) if memory.numel() else torch.empty(0, dtype=dtype)
