"""Private steps and lists of an Accelerator, as programs call and set them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.scheduler import AcceleratedScheduler

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_lists_of_what_was_prepared_can_be_replaced() -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    accelerator.prepare(model)
    kept: list[Any] = []
    for name in ("_models", "_optimizers", "_dataloaders", "_schedulers", "_custom_objects"):
        setattr(accelerator, name, kept)
        assert getattr(accelerator, name) is kept
    prepared = accelerator.prepare(torch.nn.Linear(2, 2))
    assert kept == [prepared]


def test_hooks_of_checkpoints_are_in_the_dicts_by_their_handles() -> None:
    accelerator = Accelerator(cpu=True)
    saving = accelerator.register_save_state_pre_hook(print)
    loading = accelerator.register_load_state_pre_hook(repr)
    assert accelerator._save_model_state_pre_hook == {saving.id: print}
    assert accelerator._load_model_state_pre_hook == {loading.id: repr}
    saving.remove()
    assert accelerator._save_model_state_pre_hook == {}


def test_each_object_is_prepared_in_its_pass() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert accelerator._prepare_one(model, first_pass=True) is accelerator._models[0]
    assert isinstance(accelerator._prepare_one(optimizer, first_pass=True), AcceleratedOptimizer)
    loader = accelerator._prepare_one(DataLoader(range(3)), first_pass=True)  # type: ignore[arg-type]
    assert loader is accelerator._dataloaders[0]
    assert accelerator._prepare_one(scheduler, first_pass=True) is scheduler
    assert isinstance(accelerator._prepare_one(scheduler), AcceleratedScheduler)
    assert accelerator._prepare_one("text", first_pass=True) == "text"
    assert accelerator._prepare_one(model) is model


def test_micro_batches_are_counted_by_the_step_that_programs_call_and_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seen = []
    for _ in range(2):
        accelerator._do_sync()
        seen.append((accelerator.step, accelerator.sync_gradients))
    assert seen == [(1, False), (2, True)]
    monkeypatch.setattr(Accelerator, "_do_sync", lambda self: setattr(self, "sync_gradients", False))
    with accelerator.accumulate():
        assert not accelerator.sync_gradients
    assert accelerator.step == 2


@pytest.mark.parametrize(
    ("step", "purpose"),
    [
        ("_prepare_cp", "context parallelism"),
        ("_prepare_tp", "tensor parallelism"),
        ("_prepare_fsdp2", "sharding parameters"),
    ],
)
def test_steps_of_what_does_not_work_yet_say_so(step: str, purpose: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"Accelerator\.{step}\(\.\.\.\): .*{purpose}.* does not work"):
        getattr(Accelerator(cpu=True), step)(torch.nn.Linear(1, 1))


def test_loaders_share_the_mesh_of_the_run() -> None:
    assert Accelerator(cpu=True)._prepare_device_mesh() is None


def test_a_deep_copy_is_the_same_object() -> None:
    accelerator = Accelerator(cpu=True)
    assert copy.deepcopy(accelerator) is accelerator


@pytest.mark.parametrize("dispatch", [False, True])
def test_it_pickles_with_what_it_prepared(dispatch: bool) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(10)))
    whole, *_ = accelerator.prepare(loader, skip_first_batches(loader, 2), model, optimizer)
    accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    copied = pickle.loads(pickle.dumps(accelerator))
    rows = [row.item() for (row,) in whole]
    assert [type(one) for one in copied._dataloaders] == [type(one) for one in accelerator._dataloaders]
    assert [row.item() for (row,) in copied._dataloaders[0]] == rows
    assert [row.item() for (row,) in copied._dataloaders[1]] == rows[2:]
    assert (len(copied._models), len(copied._optimizers), len(copied._custom_objects)) == (1, 1, 1)
    assert copied.device == accelerator.device
    copied.backward(copied._models[0](torch.ones(1, 1)).sum())
    assert copied._models[0].weight.grad.item() == 1.0


@pytest.mark.parametrize("free", [Accelerator.free_memory, Accelerator.clear], ids=["free_memory", "clear"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_what_is_freed_is_held_by_nothing(free: Any, precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.randn(8, 2), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    given = [weakref.ref(item) for item in (model, model.weight, optimizer, scheduler, loader, loader.dataset)]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    given += [weakref.ref(item) for item in (model, optimizer, scheduler, loader)]
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        break
    model, optimizer, scheduler, loader = free(accelerator, model, optimizer, scheduler, loader)
    assert (model, optimizer, scheduler, loader) == (None, None, None, None)
    gc.collect()
    assert [kept() for kept in given] == [None] * len(given)
