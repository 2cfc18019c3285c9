"""All-reduce of fp32 tensors between two processes: Gloo, backend shm, and shm on tensors in its arena."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from interleaved import main, serve

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
CONTESTANTS = ["gloo", "shm", "shm, tensor in the arena"]


def operations_per_turn(size_bytes: int) -> int:
    """As many as take a fraction of a second, at least 3."""
    return max(3, min(100, (32 << 20) // size_bytes))


def worker(name: str) -> None:
    """One rank of a contestant."""
    from accelerate_cpp.comm.backend import register

    register()
    dist.init_process_group("gloo" if name == "gloo" else "shm")
    tensors: dict[str, torch.Tensor] = {}

    def tensor_for(size: str) -> torch.Tensor:
        count = SIZES[size] // 4
        if name != CONTESTANTS[2]:
            return torch.ones(count)
        communicator = dist.group.WORLD._get_backend(torch.device("cpu")).communicator
        return communicator.shared_empty([count], torch.float32)

    def measure(size: str) -> float:
        if size not in tensors:
            tensors[size] = tensor_for(size)
        tensor = tensors[size].fill_(1)
        dist.barrier()
        times = []
        for _ in range(operations_per_turn(SIZES[size])):
            started = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - started)
            tensor.fill_(1)
        return statistics.median(times) * 1e6

    serve(measure)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(__file__, __doc__, CONTESTANTS, list(SIZES), worker)
