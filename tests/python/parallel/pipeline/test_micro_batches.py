"""Parts of a batch: of equal shape, with all rows of the batch once."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Batch
from accelerate_cpp.parallel.pipeline.micro_batches import MicroBatches

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_parts_have_equal_shapes_and_all_rows_once(rows: int, count: int) -> None:
    inputs = torch.arange(3.0 * rows).reshape(rows, 3)
    mask, one_for_all = torch.arange(rows), torch.ones(1, 2)
    targets = {"labels": torch.arange(rows) * 10, "of all": torch.tensor(7), "name": "text"}
    parts = MicroBatches(Batch((inputs,), {"mask": mask, "all": one_for_all, "flag": True}, targets), count, CPU)
    assert parts.count == count
    assert sum(parts.rows) == rows
    seen: list[int] = []
    for number in range(count):
        (part,), named = parts.part(number)
        own = parts.rows[number]
        assert part.shape == (parts.size, 3)
        assert named["mask"].shape == (parts.size,)
        assert named["all"].shape == (parts.size, 2)
        assert named["flag"] is True
        assert torch.equal(part[:, 0] / 3, named["mask"].float())  # rows stay together
        labels = parts.targets(number)
        assert torch.equal(labels["labels"], named["mask"][:own] * 10)
        assert (labels["of all"], labels["name"]) == (torch.tensor(7), "text")
        seen += named["mask"][:own].tolist()
    assert seen == list(range(rows))


def test_a_batch_that_parts_divide_is_not_copied() -> None:
    inputs = torch.ones(8, 3)
    assert MicroBatches(Batch((inputs,), {}, None), 4, CPU).args[0].data_ptr() == inputs.data_ptr()


def test_tensors_without_the_rows_of_the_batch_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="equally many rows, at least one"):
        MicroBatches(Batch((torch.ones(4), torch.ones(5)), {}, None), 2, CPU)
    with pytest.raises(InvalidArgument, match="equally many rows, at least one"):
        MicroBatches(Batch((torch.ones(()),), {}, None), 2, CPU)
    with pytest.raises(InvalidArgument, match=r"mask has shape \[3\], but the batch has 4 rows"):
        MicroBatches(Batch((torch.ones(4),), {"mask": torch.ones(3)}, None), 2, CPU)
    with pytest.raises(InvalidArgument, match=r"mask has shape \[\], but the batch has 4 rows"):
        MicroBatches(Batch((torch.ones(4),), {"mask": torch.ones(())}, None), 2, CPU)


@pytest.mark.parametrize("rows", [1, 4, 5, 7, 8])
def test_parts_of_a_given_size_are_filled_up_at_the_end(rows: int) -> None:
    inputs = torch.arange(rows)
    parts = MicroBatches(Batch((inputs,), {"mask": inputs * 2}, None), 2, CPU, size=4)
    assert parts.rows == [min(rows, 4), max(0, rows - 4)]
    seen = []
    for number in range(2):
        (part,), named = parts.part(number)
        assert part.shape == (4,)
        assert torch.equal(named["mask"], part * 2)
        outputs = parts.without_repeated({"rows": part[:, None], "sum": part.sum(), "text": "text"}, number)
        assert outputs["rows"].shape == (parts.rows[number], 1)
        assert outputs["sum"] == part.sum()
        seen += outputs["rows"].flatten().tolist()
    assert seen == list(range(rows))


def test_a_rank_without_inputs_knows_their_shapes() -> None:
    inputs = torch.ones(5, 3)
    mask = torch.arange(5)
    here = MicroBatches(Batch((inputs,), {"mask": mask}, None), 2, CPU)
    elsewhere = MicroBatches(Batch((), {"mask": mask}, None), 2, CPU, elsewhere=(((5, 3), torch.float32),))
    assert here.inputs == elsewhere.inputs == (((3, 3), torch.float32),)
    assert elsewhere.part(1)[0] == ()
    assert torch.equal(elsewhere.part(1)[1]["mask"], here.part(1)[1]["mask"])
