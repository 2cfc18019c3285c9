"""What programs of other frameworks share, in real processes, against what NumPy makes of all ranks' values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from processes import run_processes

# What is tried is imported inside the functions: they run in processes of their own.


def averages_of_ranks(rounds: int) -> list[list[Any]]:
    """Several dtypes and sizes, some beyond a bucket; one tensor that only rank 1 has, and one that nobody has."""
    import torch

    from accelerate_cpp.frameworks.averaging import average
    from accelerate_cpp.frameworks.processes import processes

    rank = processes().rank
    generator = torch.Generator().manual_seed(rank)
    shapes = [(), (0,), (3, 5), (1_100_000,), (2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    found = []
    for _ in range(rounds):
        own: list[Any] = [
            torch.randint(-8, 8, shape, generator=generator).to(dtype).transpose(0, -1 if len(shape) > 1 else 0)
            if shape
            else torch.tensor(float(rank), dtype=dtype)
            for shape in shapes
            for dtype in dtypes
        ]
        before = [tensor.clone() for tensor in own]
        given = [*own, None, torch.ones(2) if rank == 1 else None]
        averages = average(given, zeros=lambda index: torch.zeros(2))
        assert all(torch.equal(one, other) for one, other in zip(own, before, strict=True))
        found.append([None if tensor is None else tensor.to(torch.float64).numpy() for tensor in averages])
        found.append([tensor.to(torch.float64).numpy() for tensor in own])
    return found


def test_averages_are_the_means_of_all_ranks_tensors() -> None:
    results = run_processes(averages_of_ranks, 2, 2)
    for round_ in range(2):
        averages = [rank[2 * round_] for rank in results]
        given = [rank[2 * round_ + 1] for rank in results]
        for own, other, *means in zip(*given, *averages, strict=False):
            for mean in means:
                np.testing.assert_array_equal(mean, (own + other) / 2)
        for one in averages:
            assert one[-2] is None
            np.testing.assert_array_equal(one[-1], [0.5, 0.5])


def refusals() -> list[str]:
    import torch

    from accelerate_cpp.errors import InvalidArgument, MismatchedCollective
    from accelerate_cpp.frameworks.averaging import average
    from accelerate_cpp.frameworks.processes import processes

    rank, texts = processes().rank, []
    for given, kind in (
        ([torch.ones(2, dtype=torch.int64)], InvalidArgument),
        ([torch.ones(2 + rank), torch.ones(3)], MismatchedCollective),
        ([torch.ones(2)] * (1 + rank), MismatchedCollective),
    ):
        try:
            average(given)
        except kind as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_averaged_is_refused_on_every_rank() -> None:
    for integers, shapes, number in run_processes(refusals, 2):
        assert "op='mean' of torch.int64" in integers
        assert "rank 0" in shapes
        assert "rank 1" in shapes
        assert "rank 0" in number
        assert "rank 1" in number


def lacking(rank_that_lacks: int) -> str | None:
    import torch

    from accelerate_cpp.errors import AccelerateError
    from accelerate_cpp.frameworks.averaging import average
    from accelerate_cpp.frameworks.processes import processes

    try:
        average([None if processes().rank == rank_that_lacks else torch.ones(2)])
    except AccelerateError as error:
        return str(error)
    return None


def test_a_tensor_that_one_rank_lacks_is_refused_there_without_zeros() -> None:
    results = run_processes(lacking, 2, 1)
    assert "tensor 0 is missing on rank 1" in results[1]
    assert "tensor 0 is missing on rank 1" in results[0]


def gathered_rows(shuffle: bool, drop_last: bool) -> list[Any]:
    import torch

    from accelerate_cpp.frameworks import loading

    rows = torch.arange(22).view(11, 2)
    loader = loading.Batches(
        loading.loader_of_arrays([rows], batch_size=2, shuffle=shuffle, seed=7, drop_last=drop_last), lambda leaf: leaf
    )
    passes = []
    for _ in range(2):
        whole, last = [], []
        for (batch,) in loader:
            whole += loading.gather_for_metrics([batch[:, 0]])[0].tolist()
            last.append(loader.is_last)
        passes.append((whole, last, len(loader), loader.total_batch_size))
    return passes


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(False, False), (True, False), (True, True)])
def test_every_row_is_seen_once_in_an_order_that_no_number_of_processes_changes(
    processes: int, shuffle: bool, drop_last: bool
) -> None:
    (alone,) = run_processes(gathered_rows, 1, shuffle, drop_last)
    for passes in run_processes(gathered_rows, processes, shuffle, drop_last):
        for (whole, last, length, size), (expected, *_) in zip(passes, alone, strict=True):
            kept = 11 // (2 * processes) * 2 * processes if drop_last else 11
            assert whole == expected[:kept]
            assert last == [False] * (length - 1) + [True]
            assert size == 2 * processes
        assert (passes[0][0] != passes[1][0]) == shuffle
    if not drop_last:
        assert sorted(alone[0][0]) == list(range(0, 22, 2))


def collectives_here() -> dict[str, Any]:
    import torch

    from accelerate_cpp.frameworks import collectives
    from accelerate_cpp.frameworks.processes import processes

    place = processes()
    own = torch.arange(6.0).view(3, 2).t() * (place.rank + 2)  # not contiguous
    collectives.barrier()
    return {
        "own": own.numpy(),
        **{op: collectives.all_reduce([own], op)[0].numpy() for op in collectives.OPERATIONS},
        "gathered": collectives.all_gather([own])[0].numpy(),
        "broadcast": collectives.broadcast([own], place.world_size - 1)[0].numpy(),
        "scattered": collectives.reduce_scatter([own.reshape(6, 1)])[0].numpy(),
        "place": (place.rank, place.local_rank, place.world_size, place.local_world_size, place.is_main_process),
    }


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_collectives_give_what_numpy_makes_of_all_ranks_tensors(processes: int) -> None:
    results = run_processes(collectives_here, processes)
    own = np.stack([result["own"] for result in results])
    combined = {"sum": own.sum(0), "mean": own.mean(0), "max": own.max(0), "min": own.min(0), "product": own.prod(0)}
    for rank, result in enumerate(results):
        for op, wanted in combined.items():
            np.testing.assert_allclose(result[op], wanted, rtol=1e-6)
        np.testing.assert_array_equal(result["gathered"], own)
        np.testing.assert_array_equal(result["broadcast"], own[-1])
        np.testing.assert_array_equal(result["scattered"], own.sum(0).reshape(processes, 6 // processes, 1)[rank])
        assert result["place"] == (rank, rank, processes, processes, rank == 0)
