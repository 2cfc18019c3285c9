"""Small models and data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import accelerate.test_utils.training as original
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_cpp import Accelerator
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.test_utils import training


@pytest.fixture
def accelerator() -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def test_points_of_a_seed_are_those_of_the_original() -> None:
    ours, theirs = (module.RegressionDataset(a=1, b=2, length=5, seed=42) for module in (training, original))
    assert len(ours) == 5
    for index in (0, 4, slice(1, 3)):
        for name in ("x", "y"):
            assert ours[index][name].dtype == np.float32
            assert np.array_equal(ours[index][name], theirs[index][name])


def test_points_without_a_seed_lie_near_the_line() -> None:
    points, others = training.RegressionDataset(), training.RegressionDataset()
    assert len(points) == 64
    assert not np.array_equal(points.x, others.x)
    assert 0 < np.abs(points.y - (2 * points.x + 3)).max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_model_is_a_line(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0], dtype=dtype)
    for arguments in ((), (2, 3), (2, 3, True)):
        ours, theirs = (module.RegressionModel(*arguments) for module in (training, original))
        assert torch.equal(ours(x), theirs(x))
        assert ours(x).dtype == theirs(x).dtype
        assert ours.state_dict().keys() == theirs.state_dict().keys()
    with pytest.raises(TypeError, match="expected the tensor x"):
        training.RegressionModel()()


def test_the_line_can_be_learned(accelerator: Accelerator) -> None:
    model: Any = training.RegressionModel()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(training.RegressionDataset(seed=0), batch_size=16)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(20):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward((model(batch["x"]) - batch["y"]).square().mean())
            optimizer.step()
    assert (model.a.item(), model.b.item()) == pytest.approx((2, 3), abs=0.1)


def test_pairs_of_sentences_are_padded_and_labelled(accelerator: Accelerator) -> None:
    train, evaluation = training.mocked_dataloaders(accelerator, batch_size=4)
    assert [len(batch["labels"]) for batch in train] == [4] * 16
    assert [len(batch["labels"]) for batch in evaluation] == [1] * 32
    labels = set()
    for batch in evaluation:
        (words,), (types,) = batch["input_ids"].tolist(), batch["token_type_ids"].tolist()
        assert batch["attention_mask"].tolist() == [[1] * len(words)]
        first = words[1 : types.index(1) - 1]
        assert batch["labels"].item() == int(first == words[types.index(1) : -1])
        labels.add(batch["labels"].item())
    assert labels == {0, 1}


def test_the_rest_of_a_row_is_masked(accelerator: Accelerator) -> None:
    train, _ = training.mocked_dataloaders(accelerator)
    for batch in train:
        assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
        assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
        assert batch["attention_mask"].sum(dim=1).max() == batch["input_ids"].shape[1]


@pytest.mark.parametrize(("precision", "multiple"), [("no", 1), ("bf16", 8), ("fp16", 8), ("fp8", 16)])
def test_lengths_suit_the_precision(precision: str, multiple: int) -> None:
    accelerator: Any = SimpleNamespace(mixed_precision=precision)
    for load in (training.mocked_dataloaders, training.mocked_dataloaders_for_autoregressive_models):
        lengths = {batch["input_ids"].shape[1] for loader in load(accelerator) for batch in loader}
        assert all(length % multiple == 0 for length in lengths)
        assert multiple > 1 or len(lengths) > 4


def test_texts_are_their_own_labels(accelerator: Accelerator) -> None:
    train, evaluation = training.mocked_dataloaders_for_autoregressive_models(accelerator, batch_size=8)
    assert (len(train), len(evaluation)) == (8, 32)
    for batch in train:
        present = batch["attention_mask"] == 1
        assert torch.equal(batch["labels"][present], batch["input_ids"][present])
        assert set(batch["labels"][~present].tolist()) <= {-100}


def test_the_data_are_the_same_each_time_and_can_be_moved(accelerator: Accelerator) -> None:
    one, other = (next(iter(training.mocked_dataloaders(accelerator)[1])) for _ in range(2))
    assert torch.equal(one["input_ids"], other["input_ids"])
    moved = one.to("meta")
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert (type(moved), moved.keys()) == (type(one), one.keys())


def test_prepared_batches_can_be_moved_as_well(accelerator: Accelerator) -> None:
    train, _ = training.mocked_dataloaders(accelerator)
    batch = next(iter(accelerator.prepare(train)))
    assert batch.to("meta")["labels"].device.type == "meta"
