from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare.whole_batches import evaluated_batch, loss_of_batch, only_model


class Named(torch.nn.Module):
    """As models of transformers are: called with named inputs, and returns a loss where there are labels."""

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        return SimpleNamespace(logits=inputs * 2, loss=None if labels is None else (inputs * 2 - labels).mean())


class Two(torch.nn.Module):
    def forward(self, first: Any, second: Any) -> Any:
        return first + second


def difference(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).sum()


def test_batches_are_handed_over_as_the_model_takes_them() -> None:
    ones = torch.ones(2)
    assert loss_of_batch(torch.nn.Identity(), ones, torch.sum).item() == 2.0
    assert loss_of_batch(Two(), (ones, ones), difference, ones).item() == 2.0
    assert loss_of_batch(Named(), {"inputs": ones, "labels": ones}).item() == 1.0
    assert loss_of_batch(Named(), {"inputs": ones, "labels": ones}, difference).item() == 2.0
    assert loss_of_batch(Named(), {"inputs": ones}, lambda outputs, batch: difference(outputs, batch["inputs"])) == 2.0


def test_without_anything_that_computes_a_loss_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"train_batch: the model returned a SimpleNamespace without a loss"):
        loss_of_batch(Named(), {"inputs": torch.ones(2)})


def test_an_evaluation_has_outputs_and_perhaps_a_loss() -> None:
    ones = torch.ones(2, requires_grad=True)
    found = evaluated_batch(Named(), {"inputs": ones})
    assert (found.loss, found.outputs.tolist(), found.outputs.requires_grad) == (None, [2.0, 2.0], False)
    loss = evaluated_batch(torch.nn.Identity(), ones, difference, torch.zeros(2)).loss
    assert loss is not None
    assert loss.item() == 2.0


@pytest.mark.parametrize("count", [0, 2])
def test_of_several_models_one_has_to_be_named(count: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"train_batch: {count} models have been prepared; pass model=..."):
        only_model([torch.nn.Identity()] * count, "train_batch")
