"""What process 0 sends to the others when it reads for all."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager

import pytest

from processes import run_processes


@contextmanager
def counting(backend):
    """torch's default process group; yields a function that dispatches batches and counts what a process receives."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from accelerate_cpp.data_loader import prepare_data_loader

    dist.init_process_group(backend)
    originals = dist.broadcast_object_list, dist.broadcast, dist.scatter
    received = {}

    def counted_objects(objects, *args, **options):
        received["objects"] += 1
        # torch's own exchange of objects broadcasts, too.
        before = received["broadcast"]
        originals[0](objects, *args, **options)
        received["broadcast"] = before

    def counted_broadcast(tensor, *args, **options):
        received["broadcast"] += tensor.nbytes
        return originals[1](tensor, *args, **options)

    def counted_scatter(tensor, *args, **options):
        received["scattered"] += tensor.nbytes
        return originals[2](tensor, *args, **options)

    def read(batches):
        received.update(objects=0, broadcast=0, scattered=0)
        loader = DataLoader(batches, batch_size=None)
        device = torch.device("cpu")
        return list(prepare_data_loader(loader, device, put_on_device=True, dispatch_batches=True)), dict(received)

    dist.broadcast_object_list, dist.broadcast, dist.scatter = counted_objects, counted_broadcast, counted_scatter
    try:
        yield read
    finally:
        dist.broadcast_object_list, dist.broadcast, dist.scatter = originals
        dist.destroy_process_group()


def rows(start, stop):
    """A batch of many dtypes in many containers, made of the numbers from ``start`` to ``stop``."""
    import torch

    values = torch.arange(start, stop)
    return OrderedDict(
        f64=values.double().unsqueeze(1).expand(-1, 5),
        pair=(values % 2 == 0, [values.to(torch.bfloat16)]),
        z=torch.complex(values.float(), -values.float()).conj(),
    )


def kind_and_numbers(part):
    """The types in a part of :func:`rows`, and its numbers, which all tensors must agree on."""
    numbers = part["f64"][:, 0].tolist()
    even, (half,) = part["pair"]
    assert even.tolist() == [number % 2 == 0 for number in numbers]
    assert half.tolist() == part["z"].real.tolist() == part["z"].imag.tolist() == numbers
    return (type(part).__name__, part["f64"].shape[1], str(even.dtype), str(half.dtype)), numbers


def exchange(backend):
    import torch

    with counting(backend) as read:
        results = {}
        seen, count = read([rows(4 * step, 4 * step + 4) for step in range(8)])
        results["regular"] = ([kind_and_numbers(part) for part in seen], count)
        shapes = ((3, 2), (1, 2), (2, 4), (2, 4), (2, 2), (1, 2))
        seen, count = read([torch.ones(shape) * shape[0] for shape in shapes])
        results["ragged"] = ([part.tolist() for part in seen], count["objects"])
        seen, count = read([{"x": torch.arange(2), "table": torch.arange(4)} for _ in range(4)])
        results["whole"] = ([(part["x"].tolist(), part["table"].tolist()) for part in seen], count["scattered"])
        try:
            read([{"x": torch.arange(2), "name": "no tensor"}])
        except TypeError as error:
            results["other"] = str(error)
        return results


@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
def test_each_process_receives_its_rows_and_structure_once(backend):
    for rank, results in enumerate(run_processes(exchange, 2, backend)):
        parts, count = results["regular"]
        kind = ("OrderedDict", 5, "torch.bool", "torch.bfloat16")
        assert parts == [(kind, [float(4 * (2 * step + rank) + row) for row in range(4)]) for step in range(4)]
        header = (3 + 2) * 8
        assert count == {"objects": 1, "broadcast": 4 * header, "scattered": 4 * 4 * (5 * 8 + 1 + 2 + 8)}
        assert results["ragged"] == (
            [
                [[[3.0, 3.0]] * 3, [[2.0] * 4] * 2, [[2.0, 2.0]] * 2],
                [[[1.0, 1.0]], [[2.0] * 4] * 2, [[1.0, 1.0], [3.0, 3.0]]],
            ][rank],
            3,
        )
        own = slice(2 * rank, 2 * rank + 2)
        assert results["whole"] == ([([0, 1, 0, 1][own], [0, 1, 2, 3][own])] * 2, 0)
        assert "Unsupported types (<class 'str'>) passed to" in results["other"]
