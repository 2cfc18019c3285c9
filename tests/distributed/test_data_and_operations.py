"""Loaders, collectives and generators in real processes."""

from __future__ import annotations

import os
import signal
from collections import namedtuple
from contextlib import contextmanager

import pytest

from processes import run_processes, start_processes

Pair = namedtuple("Pair", "a b")


@contextmanager
def group():
    """torch's default process group over Gloo; yields rank and world size."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def dispatched(dataset, batch_size, drop_last=False, collate_fn=None, **options):
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.data_loader import prepare_data_loader

    return prepare_data_loader(
        DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn),
        torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=True,
        **options,
    )


def gathered_for_metrics(loader):
    from accelerate_cpp.utils.operations import gather

    seen = []
    for batch in loader:
        rows = gather(batch).tolist()
        seen += rows[: loader.remainder] if loader.end_of_dataloader and loader.remainder > 0 else rows
    return seen


def collectives():
    import torch

    from accelerate_cpp.utils import operations

    with group() as (rank, size):
        results = {
            "scalar": operations.gather(torch.tensor(float(rank))).tolist(),
            "flags": operations.gather(torch.tensor([rank == 0])).tolist(),
            "half": operations.gather(torch.tensor([rank], dtype=torch.bfloat16)).tolist(),
            "transposed": operations.gather(torch.arange(4).view(2, 2).t() + 10 * rank).tolist(),
            "empty": list(operations.gather(torch.empty(3, 0)).shape),
            "requires_grad": operations.gather(torch.ones(1, requires_grad=True)).tolist(),
        }
        nested = operations.gather(Pair(torch.tensor([rank]), {"k": [torch.tensor([[rank]])]}))
        results["nested"] = (type(nested) is Pair, nested.a.tolist(), nested.b["k"][0].tolist())

        ones = torch.ones(rank + 1)
        pad = operations.pad_across_processes
        results["padded"] = [
            pad(ones, pad_index=9).tolist(),
            pad(ones, pad_first=True).tolist(),
            pad(ones, dim=2).tolist(),
            list(pad(torch.ones(2, rank + 1), dim=-1).shape),
            pad(torch.tensor(5)).item(),
        ]
        value = torch.tensor([1.0 + rank])
        results["reduced"] = [
            operations.reduce(value, reduction).item() for reduction in ("sum", "mean", "max", "none")
        ] + [operations.reduce({"x": torch.tensor([rank])}, "mean")["x"].item(), value.item()]

        objects = [rank, f"x{rank}"]
        operations.broadcast_object_list(objects, from_process=1)
        strided = torch.full((2, 3), rank)[:, ::2]
        results["broadcast"] = (objects, operations.broadcast(strided, from_process=1).tolist(), strided.tolist())
        results["objects"] = operations.gather_object([rank] * (rank + 1))
        return rank, size, results


def test_collectives_over_nested_data():
    for rank, size, results in run_processes(collectives, 2):
        assert size == 2
        assert results == {
            "scalar": [0.0, 1.0],
            "flags": [True, False],
            "half": [0.0, 1.0],
            "transposed": [[0, 2], [1, 3], [10, 12], [11, 13]],
            "empty": [6, 0],
            "requires_grad": [1.0, 1.0],
            "nested": (True, [0, 1], [[0], [1]]),
            "padded": [[[1, 9], [1, 1]][rank], [[0, 1], [1, 1]][rank], [1] * (rank + 1), [2, 2], 5],
            "reduced": [3.0, 1.5, 2.0, 3.0, 0.5, 1.0 + rank],
            "broadcast": ([1, "x1"], [[1, 1], [1, 1]], [[1, 1], [1, 1]]),
            "objects": [0, 1, 1],
        }


def mismatched_gather():
    import torch

    from accelerate_cpp.utils import operations

    with group() as (rank, _):
        try:
            operations.pad_across_processes(torch.ones(1, rank + 1))
            operations.gather(torch.ones(rank + 1))
        except operations.DistributedOperationException as error:
            return str(error)


def test_debug_mode_names_the_shapes_that_differ():
    for message in run_processes(mismatched_gather, 2, environment={"ACCELERATE_DEBUG_MODE": "1"}):
        assert message.startswith("gather needs tensors of the same shapes on all ranks")
        assert "rank 0: [1]\n  rank 1: [2]" in message


def random_states():
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.data_loader import prepare_data_loader
    from accelerate_cpp.utils.operations import gather_object
    from accelerate_cpp.utils.random import set_seed, synchronize_rng_states

    with group() as (_rank, _):
        set_seed(5, device_specific=True)
        own = gather_object([torch.rand(1).item()])
        synchronize_rng_states(["torch"])
        shared = gather_object([torch.rand(1).item()])
        set_seed(7, device_specific=True)
        epochs = []
        for seedable in (False, True):
            loader = prepare_data_loader(
                DataLoader(list(range(8)), batch_size=2, shuffle=True),
                rng_types=["generator"],
                use_seedable_sampler=seedable,
            )
            for _ in range(2):
                epochs.append(gather_object([sample for batch in loader for sample in batch.tolist()]))
        return own, shared, epochs


def test_processes_agree_on_the_order_whatever_their_seeds():
    for own, shared, epochs in run_processes(random_states, 2):
        assert own[0] != own[1]
        assert shared[0] == shared[1]
        assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 4
        assert epochs[0] != epochs[1]
        assert epochs[2] != epochs[3]


def dispatch_grid():
    """Every combination on all ranks; returns those in which a sample was lost or seen twice."""
    wrong = []
    with group() as (rank, size):
        for samples in (1, 2, 3, 5, 6, 7, 8):
            for batch_size in (1, 2, 3):
                for drop_last in (False, True):
                    for split in (False, True):
                        length = batch_size * size if split else batch_size
                        data = list(range(samples)) if rank == 0 else [-1] * samples
                        loader = dispatched(data, length, drop_last, split_batches=split)
                        kept = samples - samples % (batch_size * size) if drop_last else samples
                        seen = gathered_for_metrics(loader)
                        steps = -(-kept // (batch_size * size))
                        if seen != list(range(kept)) or len(loader) != steps:
                            wrong.append((samples, batch_size, drop_last, split, seen, len(loader)))
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_dispatched_samples_are_gathered_exactly_once(world_size):
    assert run_processes(dispatch_grid, world_size) == [[]] * world_size


def dispatch_details():
    import torch
    from torch.utils.data import IterableDataset

    from accelerate_cpp.data_loader import skip_first_batches

    class Stream(IterableDataset):
        def __init__(self, items):
            self.items = items

        def __iter__(self):
            return iter(self.items)

    with group():
        short = [batch.tolist() for batch in dispatched(list(range(5)), 2)]
        loader = dispatched(list(range(16)), 2)
        later = skip_first_batches(loader, 2)
        skipped = [batch.tolist() for batch in later]
        batches = [torch.tensor(rows) for rows in ([0, 1, 2], [3, 4], [5], [6, 7])]
        ragged = [batch.tolist() for batch in dispatched(Stream(batches), None)]
        return short, (len(loader), len(later), skipped), ragged


def test_dispatched_batches_are_dealt_completed_and_skipped():
    first, second = run_processes(dispatch_details, 2)
    assert first[0] == [[0, 1], [4]]
    assert second[0] == [[2, 3], [0]]
    assert first[1] == (4, 2, [[8, 9], [12, 13]])
    assert second[1] == (4, 2, [[10, 11], [14, 15]])
    assert first[2] == [[0, 1, 2], [5, 6]]
    assert second[2] == [[3, 4], [7, 0]]


def cannot_be_cut():
    import torch

    with group():
        loader = dispatched([torch.zeros(3), torch.zeros(3)], 1, split_batches=True, collate_fn=lambda items: items[0])
        try:
            list(loader)
        except ValueError as error:
            return str(error)


def test_a_dispatched_batch_that_cannot_be_cut_is_refused_on_every_process():
    for message in run_processes(cannot_be_cut, 2):
        assert message.startswith("a batch of 3 samples cannot be cut into 2 equal parts")


def failing_reader():
    from accelerate_cpp.errors import PeerLost

    class Broken(list):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    with group() as (_rank, _):
        try:
            list(dispatched(Broken(range(4)), 2))
        except (OSError, PeerLost) as error:
            return type(error).__name__, str(error)


def test_an_error_while_reading_is_raised_on_every_process():
    first, second = run_processes(failing_reader, 2)
    assert first == ("OSError", "the disk is gone")
    assert second[0] == "PeerLost"
    assert "rank 0 failed while reading" in second[1]
    assert "the disk is gone" in second[1]


def schedule_and_skip():
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.data_loader import prepare_data_loader, skip_first_batches
    from accelerate_cpp.optimizer import AcceleratedOptimizer
    from accelerate_cpp.scheduler import AcceleratedScheduler

    # Before the group, because the first optimizer imports torch._dynamo, which keeps a group that exists then: Gloo's
    # threads would outlive it and could crash the end of the process.
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with group():
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = AcceleratedOptimizer(inner)
        optimizer.step()
        AcceleratedScheduler(schedule, optimizer).step()
        loader = prepare_data_loader(DataLoader(list(range(11)), batch_size=2))
        return schedule.get_last_lr()[0], gathered_for_metrics(skip_first_batches(loader, 1))


def test_a_step_counts_twice_and_skipping_keeps_the_remainder():
    assert run_processes(schedule_and_skip, 2) == [(0.25, list(range(4, 11)))] * 2


def hang():
    while True:
        signal.pause()


def exit_with_rank(offset):
    rank = int(os.environ["RANK"])
    print(f"this is {rank}")
    raise SystemExit(rank + offset)


def test_processes_that_hang_are_killed():
    outcomes = start_processes(hang, 2, timeout=1)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2


def test_outcomes_tell_how_each_process_ended():
    outcomes = start_processes(exit_with_rank, 2, 3)
    assert [(outcome.rank, outcome.exit_code, outcome.value) for outcome in outcomes] == [(0, 3, None), (1, 4, None)]
    assert [outcome.stdout for outcome in outcomes] == ["this is 0\n", "this is 1\n"]
    with pytest.raises(AssertionError, match=r"(?s)rank 0: exit code 0.*rank 1: exit code 1"):
        run_processes(exit_with_rank, 2, 0)
