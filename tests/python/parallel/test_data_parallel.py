"""The wrapper in a group of one process. Several processes are in tests/distributed."""

from __future__ import annotations

import platform
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import create_backend
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="backend shm exists on Linux only")

TIMEOUT = timedelta(seconds=120)


def wrap(module: torch.nn.Module) -> DataParallel:
    return DataParallel(module, create_backend(dist.HashStore(), 0, 1, TIMEOUT).communicator, TIMEOUT)


def test_gradients_of_the_cpu_need_no_process_group() -> None:
    assert device_group_maker(torch.device("cpu"), TIMEOUT) is None


def test_outputs_and_arguments_pass_through() -> None:
    class Model(torch.nn.Linear):
        def forward(self, data: torch.Tensor, *, scale: float = 1) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(data).sum() * scale}

    model = Model(2, 1)
    wrapped = wrap(model)
    data = torch.ones(1, 2)
    assert torch.equal(wrapped(data, scale=3)["loss"], model(data, scale=3)["loss"])


def test_attribute_of_the_model_inside_says_how_to_reach_it() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"the Linear inside it has: accelerator\.unwrap_model\(model\)\.weight$"):
        _ = wrapped.weight
    assert not hasattr(wrapped, "weight")
    with pytest.raises(AttributeError, match=r"'DataParallel' object has no attribute 'nowhere'"):
        _ = wrapped.nowhere


def test_training_and_evaluation_modes_reach_the_module() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    wrapped.eval()
    assert not wrapped.module.training
    wrapped.train()
    assert wrapped.module.training


def test_without_a_process_group_there_is_no_backend_and_no_training_of_copies() -> None:
    import copy

    assert core_backend() is None
    duplicate = copy.deepcopy(wrap(torch.nn.Linear(2, 2)))
    with pytest.raises(InvalidArgument, match="there is no such process group here"):
        duplicate(torch.ones(1, 2))


def test_modules_that_are_made_elsewhere_do_not_change_what_is_averaged() -> None:
    wrapped = wrap(torch.nn.Linear(2, 2))
    reducer = wrapped._reducer
    torch.nn.Linear(2, 2)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped._reducer is reducer
    wrapped.module.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    wrapped(torch.ones(1, 2))
    assert wrapped._reducer is not reducer
