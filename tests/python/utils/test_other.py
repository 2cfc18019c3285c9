"""Models without their wrappers, and files of one object."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils.other as original
import numpy as np
import pytest
import torch

from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.precision import forward
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.utils import other


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_gets_its_own_forward_back_on_request(compiled: bool) -> None:
    precision = precision_for("bf16", torch.device("cpu"))
    model: torch.nn.Module = torch.nn.Linear(2, 2)
    model = forward.install(torch.compile(model, backend="eager") if compiled else model, precision)
    assert "_original_forward" in other.extract_model_from_parallel(model).__dict__
    assert "_original_forward" not in other.extract_model_from_parallel(model, keep_fp32_wrapper=False).__dict__
    assert model(torch.ones(1, 2)).dtype == torch.float32


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


@pytest.mark.parametrize(("writer", "reader"), [(other, original), (original, other)])
def test_what_one_package_saves_the_other_loads(tmp_path: Path, writer: Any, reader: Any) -> None:
    accelerate.PartialState(cpu=True)
    content = {"weights": torch.ones(2), "numpy": np.random.get_state()}
    writer.save(content, str(tmp_path / "f"))
    loaded = reader.load(str(tmp_path / "f"))
    assert torch.equal(loaded["weights"], torch.ones(2))
    assert np.array_equal(loaded["numpy"][1], content["numpy"][1])


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save(print, tmp_path / "f")
    with pytest.raises(CheckpointError, match="would call functions"):
        other.load(tmp_path / "f")
