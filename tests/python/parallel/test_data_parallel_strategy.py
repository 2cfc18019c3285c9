"""The data-parallel strategy in a group of one process. Several processes are in tests/distributed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp.comm.backend import register
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.data_parallel import DataParallel
from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="backend shm exists on Linux only")


@pytest.fixture
def backend() -> str:
    return "cpu:shm"


@pytest.fixture(autouse=True)
def _group(backend: str) -> Iterator[None]:
    register()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(model: torch.nn.Module, **ddp_kwargs: Any) -> tuple[DataParallelStrategy, Any]:
    strategy = DataParallelStrategy(torch.device("cpu"), ddp_kwargs)
    return strategy, strategy.prepare(Bundle(models=[model])).models[0]


def raise_on_purpose(_: torch.Tensor) -> None:
    raise ZeroDivisionError("on purpose")


def test_over_backend_shm_a_model_gets_our_wrapper_and_can_be_unwrapped() -> None:
    model = torch.nn.Linear(2, 2)
    strategy, wrapped = prepared(model)
    assert type(wrapped) is DataParallel
    assert strategy.unwrap(wrapped) is model
    assert strategy.unwrap(model) is model
    assert list(strategy.model_state(wrapped)) == ["weight", "bias"]


@pytest.mark.parametrize("backend", ["gloo"])
def test_over_another_backend_it_gets_torchs_wrapper_with_the_users_arguments() -> None:
    strategy, wrapped = prepared(torch.nn.Linear(2, 2), find_unused_parameters=True, bucket_cap_mb=3)
    assert type(wrapped) is DistributedDataParallel
    assert wrapped.find_unused_parameters
    assert wrapped.bucket_bytes_cap == 3 << 20
    assert strategy.unwrap(wrapped) is wrapped.module
    with strategy.no_sync(wrapped):
        assert not wrapped.require_backward_grad_sync


@pytest.mark.parametrize("backend", ["cpu:shm", "gloo"])
def test_the_hook_that_the_user_chose_rounds_gradients() -> None:
    strategy, wrapped = prepared(torch.nn.Linear(1, 1, bias=False), comm_hook="bf16")
    strategy.backward(wrapped(torch.tensor([[0.1]])).sum())
    assert wrapped.module.weight.grad.item() == torch.tensor(0.1, dtype=torch.bfloat16).item()


def test_our_wrapper_takes_the_arguments_that_concern_it() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(3)])
    _, wrapped = prepared(model, bucket_cap_mb=1, broadcast_buffers=False, find_unused_parameters=True)
    assert wrapped._reducer.bucket_sizes_bytes == [1 << 20] * 3
    assert wrapped.broadcast_buffers is False


@pytest.mark.parametrize(("text", "expected"), [("", False), ("1", True)])
def test_kernels_of_ours_for_gpus_are_had_by_asking_for_them(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_CUDA_KERNELS", text)
    _, wrapped = prepared(torch.nn.Linear(2, 2))
    assert wrapped._device_kernels is expected


@pytest.mark.parametrize(("text", "expected"), [("", False), ("1", True)])
def test_nccl_without_torchs_group_is_had_by_asking_for_it(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_NCCL", text)
    _, wrapped = prepared(torch.nn.Linear(2, 2))
    assert wrapped._nccl is expected
    assert wrapped._nccl_comm is None, "it is for GPUs"


@pytest.mark.parametrize("backend", ["cpu:shm", "gloo"])
def test_a_model_with_nothing_to_train_is_wrapped_once_it_is_thawed_and_prepared_again() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    strategy, wrapped = prepared(model)
    assert wrapped is strategy.unwrap(wrapped) is model
    assert not strategy.is_thawed(model)
    with strategy.join([model]):
        pass  # which has nothing to wait for
    model.requires_grad_(True)
    assert strategy.is_thawed(model)
    again = strategy.prepare(Bundle(models=[model])).models[0]
    assert isinstance(again, DistributedDataParallel)
    assert again.module is model
    assert not strategy.is_thawed(model)


@pytest.mark.parametrize("backend", ["cpu:shm", "gloo"])
def test_a_frozen_model_that_is_trained_without_being_prepared_again_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, model = prepared(torch.nn.Linear(2, 2).requires_grad_(False))
    strategy.backward(torch.ones(1, requires_grad=True).sum())
    assert caplog.messages == []
    model.requires_grad_(True)
    for _ in range(2):
        strategy.backward(model(torch.ones(1, 2)).sum())
    [message] = caplog.messages
    assert "Linear had no parameter that requires a gradient" in message
    assert "not averaged over the processes" in message


@pytest.mark.parametrize("backend", ["cpu:shm", "gloo"])
def test_two_models_may_train_together_on_uneven_inputs() -> None:
    strategy, first = prepared(torch.nn.Linear(2, 1, bias=False))
    [second] = strategy.prepare(Bundle(models=[torch.nn.Linear(2, 1, bias=False)])).models
    with strategy.join([first, second]):
        strategy.backward(first(torch.full((1, 2), 3.0)).sum() + second(torch.full((1, 2), 5.0)).sum())
    assert [model.module.weight.grad.tolist() for model in (first, second)] == [[[3.0, 3.0]], [[5.0, 5.0]]]


def test_no_sync_ends_with_its_block_even_when_that_raises() -> None:
    strategy, wrapped = prepared(torch.nn.Linear(2, 2))
    with pytest.raises(KeyError), strategy.no_sync(wrapped):
        assert not wrapped.require_backward_grad_sync
        with wrapped.no_sync():
            pass
        assert not wrapped.require_backward_grad_sync
        raise KeyError
    assert wrapped.require_backward_grad_sync
    with strategy.no_sync(torch.nn.Linear(2, 2)):
        pass


def test_an_exception_in_backward_reaches_the_caller_and_the_next_pass_works() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            hidden = self.body(data)
            hidden.register_hook(raise_on_purpose)
            return self.head(hidden)

    strategy, wrapped = prepared(Model())
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        strategy.backward(wrapped(torch.ones(1, 2)).sum())
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    dist.barrier()
    strategy.backward(wrapped.module.head(torch.ones(1, 2)).sum())
    assert wrapped.module.head.bias.grad.tolist() == [1, 1]


def test_a_failed_pass_with_a_hook_leaves_the_group_of_the_program_as_it_is() -> None:
    strategy, wrapped = prepared(torch.nn.Linear(1, 1), comm_hook="bf16")
    output = wrapped(torch.ones(1, 1)).sum()
    output.register_hook(raise_on_purpose)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        strategy.backward(output)
    dist.barrier()
    strategy.backward(wrapped(torch.ones(1, 1)).sum())
    assert wrapped.module.bias.grad.tolist() == [1]


def test_backward_passes_its_arguments_on() -> None:
    strategy, wrapped = prepared(torch.nn.Linear(2, 2))
    output = wrapped(torch.ones(1, 2))
    strategy.backward(output, gradient=torch.ones(1, 2), retain_graph=True)
    strategy.backward(output, gradient=torch.ones(1, 2))
    assert wrapped.module.bias.grad.tolist() == [2, 2]


def test_the_strategy_does_not_keep_models_alive() -> None:
    import gc
    import weakref

    _strategy, wrapped = prepared(torch.nn.Linear(2, 2))
    remains = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert remains() is None
