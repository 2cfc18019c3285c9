"""Mistakes that users make in scripts of two ranks. Each function contains one, and says what must be told about it.

Every function is run by both ranks, in a default group of its own whose collectives give up after ``TIMEOUT``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from faults import await_event, rank

GIVE_UP = "Timeout|PeerLost"
TIMEOUT = timedelta(seconds=2)

Script = Callable[[Any], Any]


@dataclass(frozen=True)
class Mistake:
    """A script, and what rank 0 and rank 1 must be told: the class of the error ("nothing": none is raised; "A|B":
    one of the two, as the ranks give up at nearly the same moment) and pieces of the message that rank 0 is given.
    ``places``: in how many lines of the script that message says that ranks are."""

    script: Script
    kinds: tuple[str, str]
    texts: tuple[str, ...]
    places: int


MISTAKES: dict[str, Mistake] = {}


def mistake(
    *texts: str, kinds: tuple[str, str] = ("MismatchedCollective",) * 2, places: int = 2
) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        MISTAKES[script.__name__] = Mistake(script, kinds, texts, places)
        return script

    return add


def stall_in(name: str) -> None:
    """Keeps this rank busy in the script of that name until rank 0 has raised an error."""
    await_event(f"raised-{name}", 0)


def ones(*shape: int, **options: Any) -> Any:
    import torch

    return torch.ones(*shape, **options)


@mistake("rank 0: all_reduce(sum) of [4] float32", "rank 1: barrier")
def different_operations(dist: Any) -> None:
    if rank() == 0:
        dist.all_reduce(ones(4))
    else:
        dist.barrier()


@mistake("rank 0: all_reduce(sum)", "rank 1: broadcast")
def different_order(dist: Any) -> None:
    if rank() == 0:
        dist.all_reduce(ones(4))
        dist.broadcast(ones(4), 0)
    else:
        dist.broadcast(ones(4), 0)
        dist.all_reduce(ones(4))


@mistake("rank 0: all_reduce(sum) of [2]", "rank 1: all_reduce(sum) of [3]", places=1)
def different_sizes(dist: Any) -> None:
    dist.all_reduce(ones(2 + rank()))


@mistake("rank 0: all_reduce(sum) of [2, 3]", "rank 1: all_reduce(sum) of [3, 2]", places=1)
def different_shapes_of_one_size(dist: Any) -> None:
    dist.all_reduce(ones(2 + rank(), 3 - rank()))


@mistake("float32", "float64", "rank 0: all_reduce", "rank 1: all_reduce", places=1)
def different_dtypes(dist: Any) -> None:
    import torch

    dist.all_reduce(ones(4, dtype=torch.float64 if rank() else torch.float32))


@mistake("rank 0: all_reduce(sum)", "rank 1: all_reduce(max)")
def different_reductions(dist: Any) -> None:
    if rank() == 0:
        dist.all_reduce(ones(4))
    else:
        dist.all_reduce(ones(4), dist.ReduceOp.MAX)


@mistake("rank 0: broadcast of [4] float32, root 0", "rank 1: broadcast of [4] float32, root 1", places=1)
def different_roots(dist: Any) -> None:
    dist.broadcast(ones(4), rank())


@mistake("rank 0: all_gather", "rank 1: all_gather", places=1)
def gather_of_different_sizes(dist: Any) -> None:
    dist.all_gather_into_tensor(ones(2 * (2 + rank())), ones(2 + rank()))


@mistake("rank 0: reduce_scatter(sum)", "rank 1: reduce_scatter(sum)", places=1)
def reduce_scatter_of_different_sizes(dist: Any) -> None:
    dist.reduce_scatter_tensor(ones(2 + rank()), ones(2 * (2 + rank())))


@mistake("rank 0: all_to_all", "rank 1: all_to_all", "gives", "expects", places=1)
def all_to_all_that_does_not_fit(dist: Any) -> None:
    dist.all_to_all_single(ones(4), ones(4), [2, 2], [1, 3] if rank() == 0 else [2, 2])


@mistake("rank 0: barrier", "rank 1: all_reduce(sum)")
def collective_under_a_condition(dist: Any) -> None:
    if rank() == 0:
        dist.barrier()  # "only the first rank saves"
    dist.all_reduce(ones(4))


@mistake("rank 0: all_reduce(sum) of [4]", "rank 1: barrier")
def asynchronous_operations_that_differ(dist: Any) -> None:
    works = []
    if rank() == 0:
        works.append(dist.all_reduce(ones(4), async_op=True))
    else:
        works.append(dist.barrier(async_op=True))
    works[0].wait()


@mistake("rank 0: ", "rank 1: ")
def different_object_collectives(dist: Any) -> None:
    if rank() == 0:
        dist.all_gather_object([None, None], "anything")
    else:
        dist.broadcast_object_list(["anything"], 0)


@mistake("rank 0: gradient averaging", "rank 1: gather of a float32 tensor")
def backward_on_one_rank(dist: Any) -> None:
    """Rank 1's loss is not finite, and it skips the step."""
    from torch import nn

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 4))
    loss = model(ones(2, 4)).sum()
    if rank() == 0:
        accelerator.backward(loss)
    accelerator.gather(loss.detach())


@mistake("rank 0: prepare", "rank 1: prepare", places=1)
def different_models(dist: Any) -> None:
    from torch import nn

    from accelerate_cpp import Accelerator

    Accelerator(cpu=True).prepare(nn.Linear(4, 4 + rank()))


@mistake("sent 4 float32", "receive of 3 float32 from rank 1", kinds=("MismatchedCollective", "nothing"), places=1)
def message_of_another_size(dist: Any) -> None:
    if rank() == 0:
        dist.recv(ones(3), 1)
    else:
        dist.send(ones(4), 0)


@mistake("sent 4 float32", "receive of 4 int64 from rank 1", kinds=("MismatchedCollective", "nothing"), places=1)
def message_of_another_dtype(dist: Any) -> None:
    import torch

    if rank() == 0:
        dist.recv(ones(4, dtype=torch.int64), 1)
    else:
        dist.send(ones(4), 0)


@mistake("receive of 4 float32 from rank 1", kinds=(GIVE_UP, GIVE_UP), places=1)
def both_receive_first(dist: Any) -> None:
    data = ones(4)
    dist.recv(data, 1 - rank())
    dist.send(data, 1 - rank())


@mistake("receive of 4 float32 from rank 1 with tag 1", "nothing came", kinds=("Timeout", "nothing"), places=1)
def another_tag(dist: Any) -> None:
    if rank() == 0:
        dist.recv(ones(4), 1, tag=1)
    else:
        dist.send(ones(4), 0, tag=2)


@mistake("barrier", "rank 0 waited for rank 1", kinds=("Timeout", "nothing"), places=1)
def endless_loop(dist: Any) -> None:
    """Rank 1 never comes out of the user's code."""
    if rank() == 1:
        stall_in("endless_loop")
    else:
        dist.barrier()


@mistake("gather of a float32", "rank 0 waited for rank 1", kinds=("Timeout", "PeerLost"), places=1)
def data_loader_that_stalls(dist: Any) -> None:
    from torch.utils.data import DataLoader, Dataset

    from accelerate_cpp import Accelerator

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if rank() == 1 and index >= 6:
                stall_in("data_loader_that_stalls")
            return ones(2) * index

    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(Slow(), batch_size=2)):
        accelerator.gather(batch)


@mistake("barrier", "waited for rank 1: rank 1 has left the group", kinds=("PeerLost", "nothing"), places=1)
def one_rank_leaves_early(dist: Any) -> None:
    if rank() == 0:
        dist.barrier()
    else:
        dist.destroy_process_group()


@mistake("all_reduce(sum)", "waited for rank 1", kinds=(GIVE_UP, GIVE_UP), places=1)
def subgroups_in_another_order(dist: Any) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (first, second):
        group._get_backend(ones(1).device).set_timeout(TIMEOUT)
    groups = [first, second] if rank() == 0 else [second, first]
    for group in groups:
        dist.all_reduce(ones(4), group=group)
