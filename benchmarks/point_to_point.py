"""Messages between two processes of one host: shm against Gloo, through torch.distributed.

"ping-pong" is the time of a message there and one back, "stream" that of eight messages that are posted at once and
received, and of one answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from interleaved import run, serve
from workers import own_rank

SIZES = {"8 B": 8, "4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20}
KINDS = ("ping-pong", "stream")
STREAM = 8
TURN_BYTES = 128 << 20
TURN_OPERATIONS = 300


def worker(name: str) -> None:
    """One rank of a contestant."""
    import torch
    import torch.distributed as dist

    import accelerate_cpp.comm.backend as backend

    backend.register()
    dist.init_process_group("gloo" if name == "gloo" else "cpu:shm")
    rank, peer = own_rank(), 1 - own_rank()

    def ping_pong(data: torch.Tensor) -> None:
        if rank == 0:
            dist.send(data, peer)
            dist.recv(data, peer)
        else:
            dist.recv(data, peer)
            dist.send(data, peer)

    def stream(data: torch.Tensor) -> None:
        if rank == 0:
            for work in [dist.isend(data, peer, tag=tag) for tag in range(STREAM)]:
                work.wait()
        else:
            for work in [dist.irecv(data, peer, tag=tag) for tag in range(STREAM)]:
                work.wait()
        answer = torch.zeros(1)
        dist.recv(answer, peer) if rank == 0 else dist.send(answer, peer)

    operations: dict[str, Callable[[torch.Tensor], None]] = {"ping-pong": ping_pong, "stream": stream}

    def turn(measurement: str) -> list[float]:
        kind, size = measurement.split(" ", 1)
        operation, data = operations[kind], torch.ones(SIZES[size], dtype=torch.uint8)
        count = max(4, min(TURN_OPERATIONS, TURN_BYTES // (SIZES[size] * STREAM)))
        for _ in range(1 + count // 10):
            operation(data)
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            operation(data)
            seconds.append(time.perf_counter() - began)
        return seconds

    serve(turn)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(__doc__, worker, [f"{kind} {size}" for kind in KINDS for size in SIZES], ("gloo", "shm"))
