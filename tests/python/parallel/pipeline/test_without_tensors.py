"""A whole model without the values of its tensors."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from accelerate_cpp.parallel.pipeline.without_tensors import can_be_saved, without_tensors


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"layers": 2}
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)
        self.second.bias.requires_grad_(False)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.first.weight
        self.again = self.head
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.register_module("nothing", None)

    def save_pretrained(self, folder: str) -> None: ...


def test_names_shapes_and_what_is_shared_are_those_of_the_model() -> None:
    model = Model()
    empty = without_tensors(model)
    assert type(empty) is Model
    assert empty.config is model.config
    assert {name: (value.shape, value.dtype) for name, value in empty.state_dict().items()} == {
        name: (value.shape, value.dtype) for name, value in model.state_dict().items()
    }
    assert all(value.is_meta for value in (*empty.parameters(), *empty.buffers()))
    assert [name for name, one in empty.named_parameters() if not one.requires_grad] == ["second.bias"]
    assert empty.head.weight is empty.first.weight
    assert empty.again is empty.head
    assert not any(value.is_meta for value in (*model.parameters(), *model.buffers())), "the model is as it was"


def test_the_values_are_not_kept() -> None:
    model = Model()
    references = [weakref.ref(value) for value in (*model.parameters(), *model.buffers())]
    empty = without_tensors(model)
    del model
    gc.collect()
    assert [one for one in references if one() is not None] == []
    assert len(list(empty.parameters())) == 5


def test_models_with_a_configuration_and_files_can_be_saved() -> None:
    assert can_be_saved(Model())
    assert not can_be_saved(nn.Linear(1, 1))
