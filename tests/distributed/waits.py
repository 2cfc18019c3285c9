"""The ways in which a rank can wait for rank 1: through torch.distributed, its wrappers, and this library's.

Each is a function that every rank of a job calls when they are all connected, and that returns what then waits.
Whatever needs rank 1 before that is done by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Waiter = Callable[[], Any]


def all_reduce(dist: Any) -> Waiter:
    import torch

    return lambda: dist.all_reduce(torch.ones(4))


def large_all_reduce(dist: Any) -> Waiter:
    """Of more than fits into the staging memory at once."""
    import torch

    data = torch.ones(4 << 20)
    return lambda: dist.all_reduce(data)


def broadcast(dist: Any) -> Waiter:
    import torch

    return lambda: dist.broadcast(torch.ones(4), 1)


def barrier(dist: Any) -> Waiter:
    return lambda: dist.barrier()


def asynchronous(dist: Any) -> Waiter:
    import torch

    return lambda: dist.all_reduce(torch.ones(4), async_op=True).wait()


def future(dist: Any) -> Waiter:
    import torch

    return lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()


def receive(dist: Any) -> Waiter:
    import torch

    return lambda: dist.recv(torch.empty(4), 1)


def objects(dist: Any) -> Waiter:
    return lambda: dist.all_gather_object([None] * dist.get_world_size(), "anything")


def _linear() -> Any:
    import torch

    return torch.nn.Linear(300, 300)


def _loss(model: Any) -> Any:
    import torch

    return model(torch.ones(2, 300)).sum()


def distributed_data_parallel(dist: Any) -> Waiter:
    """torch's wrapper, in its backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_linear())  # whose hooks end with it
    loss = _loss(model)
    return lambda: (loss.backward(), model)


def accelerator_backward(dist: Any) -> Waiter:
    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_linear())
    loss = _loss(model)
    return lambda: (accelerator.backward(loss), model)


def accelerator_gather(dist: Any) -> Waiter:
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    return lambda: accelerator.gather(torch.ones(4))


WAITS: dict[str, Callable[[Any], Waiter]] = {
    wait.__name__: wait
    for wait in (
        all_reduce,
        large_all_reduce,
        broadcast,
        barrier,
        asynchronous,
        future,
        receive,
        objects,
        distributed_data_parallel,
        accelerator_backward,
        accelerator_gather,
    )
}
