"""LocalSGD as its callers construct it. What it does is tested with two processes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.local_sgd import LocalSGD as OriginalLocalSGD

from accelerate_cpp import Accelerator
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.local_sgd import LocalSGD
from accelerate_cpp.state import AcceleratorState, GradientState
from accelerate_cpp.utils import DistributedType


@pytest.fixture
def accelerator() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True)


@pytest.mark.parametrize("method", ["__init__", "__enter__", "__exit__", "step"])
def test_signatures_are_the_originals(method: str) -> None:
    def shape(owner: type) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert shape(LocalSGD) == shape(OriginalLocalSGD)


def test_one_process_switches_it_off(accelerator: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with LocalSGD(accelerator, model, 2) as local:
        assert local.enabled is False
        before = model.weight.item()
        local.step()
        local.step()
        model(torch.ones(1, 1)).sum().backward()
    assert local.num_steps == 2
    assert model.weight.item() == before


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_steps_that_are_no_positive_integer_are_refused(accelerator: Any, steps: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"local_sgd_steps=.*at least 1.*enabled=False"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), steps)


def test_the_number_of_steps_may_be_anything_where_it_is_switched_off(accelerator: Any) -> None:
    with LocalSGD(accelerator, torch.nn.Linear(1, 1), None, enabled=False) as local:  # type: ignore[arg-type]
        local.step()
    assert local.num_steps == 1


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_runs_whose_processes_do_not_hold_the_whole_model_are_refused(kind: DistributedType) -> None:
    sharded: Any = SimpleNamespace(distributed_type=kind, use_distributed=True)
    with pytest.raises(InvalidArgument, match=rf"type {kind.value}; expected .*MULTI_CPU.*enabled=False"):
        LocalSGD(sharded, torch.nn.Linear(1, 1), 2)
    assert LocalSGD(sharded, torch.nn.Linear(1, 1), 2, enabled=False).enabled is False


def test_an_exception_in_the_block_reaches_the_caller(accelerator: Any) -> None:
    with pytest.raises(LookupError, match="out of data"), LocalSGD(accelerator, torch.nn.Linear(1, 1), 2):
        raise LookupError("out of data")
