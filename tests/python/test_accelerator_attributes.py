"""What the façade says of itself in one process: handlers, kinds of processes and optimizers, the flag of a trigger."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.devices.table import accelerators
from accelerate_cpp.runtime import current
from accelerate_cpp.utils.dataclasses import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_handlers_are_kept_and_absent_ones_are_none() -> None:
    handlers = [DistributedDataParallelKwargs(bucket_cap_mb=5), InitProcessGroupKwargs(), ProfileKwargs()]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[*handlers])
    assert [accelerator.ddp_handler, accelerator.init_handler, accelerator.profile_handler] == handlers
    assert accelerator.ddp_handler is handlers[0]
    plain = Accelerator(cpu=True)
    assert [plain.ddp_handler, plain.init_handler, plain.profile_handler] == [None] * 3


def test_loader_settings_can_be_read_and_even_batches_set() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.dispatch_batches is None
    assert accelerator.even_batches
    assert not accelerator.use_seedable_sampler
    assert not accelerator.non_blocking
    assert not accelerator.use_stateful_dataloader
    accelerator.even_batches = False
    assert not accelerator.dataloader_config.even_batches


@pytest.mark.parametrize(
    "name", ["dispatch_batches", "use_seedable_sampler", "non_blocking", "use_stateful_dataloader"]
)
def test_loader_settings_are_those_that_were_given(name: str) -> None:
    assert getattr(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{name: True})), name) is True


@pytest.mark.parametrize("device", ["cpu", *(kind.type for kind in accelerators())])
@pytest.mark.parametrize("world_size", [1, 2])
def test_several_processes_with_accelerators_are_several_devices(
    monkeypatch: pytest.MonkeyPatch, device: str, world_size: int
) -> None:
    accelerator = Accelerator(cpu=True)
    topology = replace(accelerator._session.topology, world_size=world_size)
    session = replace(accelerator._session, device=SimpleNamespace(type=device), topology=topology)
    monkeypatch.setattr(current, "session", session)
    monkeypatch.setattr(accelerator, "_session", session)
    assert accelerator.multi_device is (world_size > 1 and device not in ("cpu", "mps", "xla"))


def test_one_process_saves_models_and_has_one_device() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.should_save_model
    assert not accelerator.multi_device
    assert accelerator.distributed_type is DistributedType.NO


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_first_process_of_each_host_saves_models(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    topology = replace(accelerator._session.topology, rank=rank, local_rank=rank % 2, world_size=4)
    monkeypatch.setattr(current, "session", replace(accelerator._session, topology=topology))
    assert accelerator.should_save_model is (rank in (0, 2))


def test_an_optimizer_of_lomo_is_noticed() -> None:
    class Lomo(torch.optim.SGD):
        __module__ = "lomo_optim.lomo"

    class Own(Lomo):
        __module__ = "program"

    accelerator = Accelerator(cpu=True)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    accelerator.prepare(torch.optim.SGD(parameters, lr=0.1))
    assert not accelerator.has_lomo_optimizer
    accelerator.prepare(Own(parameters, lr=0.1))
    assert accelerator.has_lomo_optimizer


def test_the_flag_of_a_trigger_can_be_read_and_set() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert torch.equal(accelerator.flag_tensor, torch.tensor(1))
    assert accelerator.check_trigger()
    assert torch.equal(accelerator.flag_tensor, torch.tensor(0))
    accelerator.flag_tensor = torch.tensor(1)
    assert accelerator.check_trigger()


def test_one_process_has_nothing_to_synchronise() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.no_sync(model):
        loss = model(torch.ones(1, 1)).sum()
    with Accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert model.weight.grad.item() == 1.0
