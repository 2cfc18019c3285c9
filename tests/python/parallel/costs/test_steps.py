"""Operations of steps; that they are those of real ones is tested in tests/distributed/test_costs.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from accelerate_cpp._native import GradientReducer, create_backend
from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.operations import Operation, by_kind
from accelerate_cpp.parallel.costs.parts import Decoder, Weight
from accelerate_cpp.parallel.costs.steps import Step, buckets_of, operations_of, stages_of
from accelerate_cpp.parallel.pipeline.schedules import bubble_fraction

DECODER = Decoder(layers=4, hidden=32, heads=4, kv_heads=4, intermediate=64, vocabulary=96)
STEP = Step(rows=2, tokens=16)
MINUTE = timedelta(minutes=1)


def operations(sizes: dict[str, int], rank: int = 0, **options: Any) -> list[Operation]:
    step = Step(**{**vars(STEP), **options})
    mesh = Mesh(rank, sizes)
    return operations_of(DECODER.parts(len(stages_of(mesh, step.schedule))), mesh, step)


def test_one_process_communicates_with_nobody() -> None:
    assert operations({}) == []


def test_all_ranks_of_a_collective_take_part_in_as_many() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    found = [by_kind(operations(sizes, rank, sharded=True, clips=True)) for rank in range(8)]
    assert all(one == found[0] for one in found)
    assert set(found[0]) == {("dp_replicate",), ("dp_shard",), ("tp",)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_what_stages_send_others_receive(schedule: str) -> None:
    found = [by_kind(operations({"pp": 3}, rank, schedule=schedule, micro_batches=8))[("pp",)] for rank in range(3)]
    assert sum(one["send"][1] for one in found) == sum(one["receive"][1] for one in found)
    cuts = len(stages_of(Mesh(0, {"pp": 3}), schedule)) - 1 - (schedule == "zero_bubble")  # two stages meet in a rank
    assert sum(one["send"][0] for one in found) == 2 * 8 * cuts


def test_narrow_elements_halve_what_travels_but_not_the_sums_of_rings() -> None:
    wide, narrow = (by_kind(operations({"cp": 2}, attention="alltoall", element_bytes=n)) for n in (4, 2))
    kv = 2 * 2 * 8 * 32  # of rows and tokens here
    assert wide[("cp",)]["send"] == (4 * 4, 4 * (2 * kv * 4 + 2 * kv * 4))
    assert narrow[("cp",)]["send"] == (4 * 4, 4 * (2 * kv * 2 + 2 * kv * 4))


def test_keys_that_several_processes_need_are_sent_to_each() -> None:
    few = Decoder(**{**vars(DECODER), "kv_heads": 2})
    mesh = Mesh(0, {"cp": 4})
    found = operations_of(few.parts(), mesh, Step(**{**vars(STEP), "attention": "ulysses"}))
    sizes = {one.size_bytes for one in found if one.kind == "all_to_all"}
    assert sizes == {2 * 4 * 32 * 4}  # keys of 2 heads, twice, are as many as queries of 4 heads


@pytest.mark.parametrize("cap_bytes", [25 * 2**20, 2 * 2**20, 2**16])
def test_buckets_are_those_of_a_reducer(cap_bytes: int) -> None:
    """Of gradients that do not fill their slots, and of some that are larger than a bucket."""
    shapes = [(500, 500), (300, 1000), (3,), (1000, 1000), (77,), (200, 700), (300, 500), (5, 5)]
    reducer = GradientReducer(
        create_backend(HashStore(), 0, 1, MINUTE).communicator,
        [(str(number), torch.nn.Parameter(torch.zeros(shape)), False) for number, shape in enumerate(shapes)],
        [],
        first_bucket_cap_bytes=min(2**20, cap_bytes),
        bucket_cap_bytes=cap_bytes,
        timeout=MINUTE,
    )
    found = buckets_of([Weight(shape) for shape in shapes], 4, cap_bytes)
    assert found == reducer.bucket_sizes_bytes
    assert len(found) > 1


def test_a_step_waits_for_the_bubble_of_its_schedule() -> None:
    assert STEP.bubble(1) == 0.0
    step = Step(rows=1, tokens=16, micro_batches=8, schedule="interleaved")
    assert step.bubble(4) == bubble_fraction("interleaved", 8, 8) == pytest.approx(3 / 19)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"tp": 8}, {}, "4 heads and 4 heads of keys over tp=8"),
        ({"cp": 16}, {}, "16 tokens over cp=16; expected a multiple of 32"),
        ({"cp": 8}, {"attention": "ulysses"}, "4 heads over cp=8 by 'ulysses'"),
        ({"tp": 4}, {"sequence_parallel": True, "tokens": 18}, "18 tokens over tp=4; expected a multiple of 4"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(sizes: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        operations(sizes, **options)


def test_another_number_of_stages_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"1 stages; expected 4 for pp=2 and schedule 'zero_bubble'"):
        operations_of(DECODER.parts(), Mesh(0, {"pp": 2}), Step(1, 16, schedule="zero_bubble"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows=0; expected 1 or more"),
        ({"attention": "all"}, "attention='all'; expected 'allgather'"),
        ({"schedule": "none"}, "schedule='none'; expected one of"),
    ],
)
def test_impossible_steps_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Step(**{**vars(STEP), **wrong})
