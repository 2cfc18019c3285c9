"""Models without their wrappers."""

from __future__ import annotations

import inspect

import accelerate.utils.other as original
import pytest
import torch

from accelerate_cpp.utils import other


@pytest.mark.parametrize("name", ["extract_model_from_parallel", "is_compiled_module", "wait_for_everyone"])
def test_parameters_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(other, name)) == shape(getattr(original, name))


def test_a_model_is_taken_out_of_its_wrappers():
    model = torch.nn.Linear(1, 1)
    wrapped = torch.nn.DataParallel(torch.nn.DataParallel(model))
    assert other.extract_model_from_parallel(wrapped) is model
    assert other.extract_model_from_parallel(model) is model


def test_submodules_are_taken_out_if_asked_for():
    inner = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(torch.nn.DataParallel(inner))
    assert type(other.extract_model_from_parallel(model)[0]) is torch.nn.DataParallel
    assert other.extract_model_from_parallel(model, recursive=True)[0] is inner


@pytest.mark.parametrize("keep", [True, False])
def test_a_compiled_model_stays_compiled_unless_asked_not_to(keep):
    model = torch.nn.Linear(1, 1)
    compiled = torch.compile(torch.nn.DataParallel(model), backend="eager")
    extracted = other.extract_model_from_parallel(compiled, keep_torch_compile=keep)
    assert other.is_compiled_module(extracted) is keep
    assert (extracted._orig_mod if keep else extracted) is model


def test_one_process_does_not_wait():
    other.wait_for_everyone()
