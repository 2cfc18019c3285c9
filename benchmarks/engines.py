"""Collectives of torch.distributed's backends, of Open MPI and, as the limit, a copy in memory: behind one interface.

An engine makes buffers, says how a collective runs on them, and writes and reads them as fp32 arrays for the check of
what the collective did. Broadcast comes from the last rank, so that rank 0, whose time counts, receives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Run = Callable[[], object]


class Engine(Protocol):
    """One rank of a contestant."""

    rank: int
    size: int

    def empty(self, count: int, dtype: str) -> Any:
        """A buffer of ``count`` elements of ``"fp32"`` or ``"bf16"``."""

    def write(self, buffer: Any, values: Array) -> None:
        """Overwrites the buffer, with one value per element or with one for all."""

    def read(self, buffer: Any) -> Array:
        """The elements of the buffer."""

    def operation(self, name: str, given: Any, result: Any) -> Run:
        """The call that is timed; it keeps the buffers. ``given is result`` for operations that work in place."""

    def meet(self) -> None:
        """Waits for all ranks."""

    def leave(self) -> None:
        """Ends the use of the engine."""


class TorchEngine:
    """A backend of torch.distributed, on ordinary tensors or on tensors in the arena of backend ``shm``."""

    def __init__(self, backend: str, *, in_arena: bool = False) -> None:
        import torch
        import torch.distributed as dist

        if backend == "shm":
            from accelerate_cpp.comm.backend import register

            register()
        self._torch, self._dist, self._in_arena = torch, dist, in_arena
        self._dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        dist.init_process_group(backend)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._alone = dist.new_subgroups(group_size=1)[0]

    def empty(self, count: int, dtype: str) -> Any:
        if not self._in_arena:
            return self._torch.empty(count, dtype=self._dtypes[dtype])
        import accelerate_cpp

        return accelerate_cpp.shared_empty(count, dtype=self._dtypes[dtype])

    def write(self, buffer: Any, values: Array) -> None:
        buffer.copy_(self._torch.from_numpy(values))

    def read(self, buffer: Any) -> Array:
        values: Array = buffer.float().numpy()
        return values

    def operation(self, name: str, given: Any, result: Any) -> Run:
        dist, last = self._dist, self.size - 1
        # torch before 2.13 has only the names that later ones warn about.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        operations: dict[str, Run] = {
            "all_reduce": lambda: dist.all_reduce(given),
            "reduce_scatter": lambda: reduce_scatter(result, given),
            "all_gather": lambda: all_gather(result, given),
            "broadcast": lambda: dist.broadcast(given, last),
            "call": lambda: dist.all_reduce(given, group=self._alone),
        }
        return operations[name]

    def meet(self) -> None:
        self._dist.barrier()

    def leave(self) -> None:
        self._dist.destroy_process_group()


class DirectEngine(TorchEngine):
    """The communicator of backend ``shm``, called without torch.distributed."""

    def __init__(self, *, in_arena: bool = False) -> None:
        super().__init__("shm", in_arena=in_arena)
        world: Any = self._dist.group.WORLD
        backend = world._get_backend(self._torch.device("cpu"))
        self._communicator, self._timeout = backend.communicator, backend.timeout

    def operation(self, name: str, given: Any, result: Any) -> Run:
        all_reduce, add, timeout = self._communicator.all_reduce, self._dist.ReduceOp.SUM, self._timeout
        operations: dict[str, Run] = {"all_reduce": lambda: all_reduce(given, add, timeout)}
        return operations[name]


class MpiEngine:
    """Open MPI through mpi4py; knows no bf16."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._in_place, self._alone, self._world = MPI.IN_PLACE, MPI.COMM_SELF, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def empty(self, count: int, dtype: str) -> Array:
        return np.empty(count, {"fp32": np.float32}[dtype])

    def write(self, buffer: Array, values: Array) -> None:
        buffer[:] = values

    def read(self, buffer: Array) -> Array:
        return buffer

    def operation(self, name: str, given: Array, result: Array) -> Run:
        world, in_place, last = self._world, self._in_place, self.size - 1
        operations: dict[str, Run] = {
            "all_reduce": lambda: world.Allreduce(in_place, given),
            "reduce_scatter": lambda: world.Reduce_scatter_block(given, result),
            "all_gather": lambda: world.Allgather(given, result),
            "broadcast": lambda: world.Bcast(given, last),
            "call": lambda: self._alone.Allreduce(in_place, given),
        }
        return operations[name]

    def meet(self) -> None:
        self._world.Barrier()

    def leave(self) -> None:
        """mpi4py finalizes MPI when the interpreter ends."""


class CopyEngine:
    """The limit: every rank copies a buffer into another one with the C library's memcpy. The ranks start together
    since their turns do, which is as well as copies that take no notice of each other can be.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def empty(self, count: int, dtype: str) -> NDArray[Any]:
        return np.zeros(count, {"fp32": np.float32, "bf16": np.uint16}[dtype])

    def write(self, buffer: NDArray[Any], values: Array) -> None:
        buffer[:] = values

    def read(self, buffer: NDArray[Any]) -> Array:
        return buffer.astype(np.float32)

    def operation(self, name: str, given: NDArray[Any], result: NDArray[Any]) -> Run:
        # These views keep the buffers alive, which addresses would not.
        target, source = ((ctypes.c_char * buffer.nbytes).from_buffer(buffer.data) for buffer in (result, given))
        size_bytes = given.nbytes
        operations: dict[str, Run] = {"copy": lambda: ctypes.memmove(target, source, size_bytes)}
        return operations[name]

    def meet(self) -> None:
        pass

    def leave(self) -> None:
        pass
