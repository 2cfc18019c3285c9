"""Collectives over the batches of real programs: nested, of many dtypes, empty, ragged, large, and mismatched."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Pair = namedtuple("Pair", "first second")


@contextmanager
def connected(backend: str) -> Iterator[int]:
    """The rank of this process, in a group over ``backend``.

    The group ends with the block: threads of Gloo that let go of tensors while the interpreter ends crash the process.
    """
    import torch.distributed as dist

    from accelerate_cpp import Accelerator
    from accelerate_cpp.comm.backend import register

    register()
    dist.init_process_group(backend)
    try:
        yield Accelerator(cpu=True).process_index
    finally:
        dist.destroy_process_group()


def batch_of(rank: int) -> dict[str, Any]:
    """A batch whose values tell their rank."""
    import torch

    return {
        "pair": Pair(torch.full((2, 3), float(rank)), [torch.tensor(rank), (torch.full((1,), rank % 2 == 1),)]),
        "user": UserDict(x=torch.full((2,), rank, dtype=torch.bfloat16)),
        "default": defaultdict(list, y=torch.full((2, 2), rank, dtype=torch.int8)),
        "strided": torch.full((4, 4), rank)[:, ::2],
        "empty": [torch.zeros(0, 5), torch.zeros(2, 0)],
        "large": torch.full((30_000,), float(rank)),
        "complex": torch.full((1,), complex(rank, 1)),
        "none": [],
    }


def gathers(backend: str) -> tuple[list[str], bool]:
    import torch

    from accelerate_cpp.devices.tree import leaves_of
    from accelerate_cpp.utils import gather

    with connected(backend) as rank:
        gathered = gather(batch_of(rank))
        size = torch.distributed.get_world_size()
        everyones = [list(leaves_of(batch_of(peer))) for peer in range(size)]
        for whole, parts in zip(leaves_of(gathered), zip(*everyones, strict=True), strict=True):
            expected = torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
            assert whole.dtype == expected.dtype
            assert torch.equal(whole, expected)
        types = [type(gathered[key]).__name__ for key in ("pair", "user", "default", "none")]
        return types, gathered["default"].default_factory is list


@pytest.mark.parametrize(("backend", "world_size"), [("shm", 2), ("shm", 3), ("gloo", 2)])
def test_every_tensor_is_gathered_and_every_container_kept(backend: str, world_size: int) -> None:
    for types, keeps_factory in run_processes(gathers, world_size, backend):
        assert types == ["Pair", "UserDict", "defaultdict", "list"]
        assert keeps_factory


def pads(backend: str) -> list[Any]:
    import torch

    from accelerate_cpp.utils import gather, listify, pad_across_processes

    with connected(backend) as rank:
        ragged = {
            "rows": torch.full((rank + 1, 2), rank),
            "words": [torch.ones(2 - rank)],
            "scalar": torch.tensor(rank),
        }
        padded = pad_across_processes(ragged, pad_index=-1)
        columns = pad_across_processes(Pair(torch.ones(1, rank + 1), torch.ones(3)), dim=1, pad_first=True)
        even = torch.ones(3)
        same = pad_across_processes(even) is even
        return [listify(gather(padded)), [list(one.shape) for one in columns], columns[0].tolist(), same]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ragged_tensors_can_be_gathered_when_padded(backend: str) -> None:
    for rank, (gathered, shapes, column, same) in enumerate(run_processes(pads, 2, backend)):
        assert gathered == {
            "rows": [[0, 0], [-1, -1], [1, 1], [1, 1]],
            "words": [[1, 1, 1, -1]],
            "scalar": [0, 1],
        }
        assert shapes == [[1, 2], [3]]
        assert column == [[[0.0, 1.0]], [[1.0, 1.0]]][rank]
        assert same


def exchanges_objects(backend: str) -> list[Any]:
    import torch

    from accelerate_cpp.utils import broadcast_object_list, copy_tensor_to_devices, gather_object

    with connected(backend) as rank:
        found = [gather_object([rank, {"x": "y" * length * rank}]) for length in (0, 10, 9_000)]
        found.append(gather_object([]))
        found.append(broadcast_object_list([rank, [rank]], from_process=1))
        found.append(copy_tensor_to_devices(torch.tensor([[1.5]]) if rank == 1 else None).tolist())
        try:
            copy_tensor_to_devices(torch.ones(1))
        except ValueError as error:
            found.append(str(error))
        return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_objects_of_all_lengths_are_exchanged(backend: str) -> None:
    for found in run_processes(exchanges_objects, 2, backend):
        assert found == [
            *([0, {"x": ""}, 1, {"x": "y" * length}] for length in (0, 10, 9_000)),
            [],
            [1, [1]],
            [[1.5]],
            "copy_tensor_to_devices: one rank must have a tensor; found one on ranks [0, 1]",
        ]


def mismatches(backend: str) -> list[tuple[str, str]]:
    import torch

    from accelerate_cpp.utils import gather, gather_object

    with connected(backend) as rank:
        attempts = [
            lambda: gather(torch.ones(2 + rank)),
            lambda: gather([torch.ones(2 + rank), torch.ones(3 - rank)]),
            lambda: gather([torch.ones(2)] * (1 + rank)),
            lambda: gather(torch.ones(2, dtype=[torch.float32, torch.int32][rank])),
            lambda: gather(torch.ones(30_000 + rank)),
            lambda: gather([torch.ones(2)] if rank else []),
            lambda: gather(torch.ones(2)) if rank else gather_object([1]),
        ]
        raised = []
        for attempt in attempts:
            try:
                attempt()
                raised.append(("nothing", "was raised"))
            except Exception as error:
                raised.append((type(error).__name__, str(error)))
            assert gather_object([rank]) == [0, 1]
        return raised


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_tensors_that_differ_raise_on_all_ranks_which_go_on(backend: str) -> None:
    for raised in run_processes(mismatches, 2, backend):
        assert [kind for kind, _ in raised] == ["MismatchedCollective"] * 7
        texts = [text for _, text in raised]
        assert "rank 0: gather of a float32 tensor of shape (2,) at" in texts[0]
        assert "rank 1: gather of a float32 tensor of shape (3,) at" in texts[0]
        assert "rank 1: gather of 2 tensors: float32 (3,), float32 (2,) at" in texts[1]
        assert "rank 1: gather of an int32 tensor of shape (2,) at" in texts[3]
        assert "rank 0: gather_object of list at" in texts[6]
        assert all(text.count("test_operations_of_batches.py:") == 2 for text in texts)


def metrics() -> list[Any]:
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    samples = [{"x": float(i), "y": (i, [i])} for i in range(11)]
    loader = accelerator.prepare(DataLoader(samples, batch_size=2))
    gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
    named = [accelerator.gather_for_metrics([f"{i}" for i in batch["y"][0].tolist()]) for batch in loader]
    floats = [value for batch in gathered for value in batch["x"].tolist()]
    integers = [value for batch in gathered for value in batch["y"][1][0].tolist()]
    return [floats, integers, [name for names in named for name in names]]


def test_metrics_of_nested_batches_see_each_sample_once() -> None:
    for floats, integers, names in run_processes(metrics, 2):
        assert floats == integers == list(range(11))
        assert names == [str(i) for i in range(11)]
