"""Several Accelerators in one process, as scripts of GANs and of teachers and students have them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import accelerate
import accelerate.state
import pytest
import torch

import accelerate_cpp
from accelerate_cpp.state import GradientState

PACKAGES = {"ours": accelerate_cpp, "original": accelerate}


pytestmark = pytest.mark.usefixtures("fresh_states")


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return tuple(accelerator.prepare(model, optimizer, scheduler))


def alternating(package: str) -> dict[str, list[tuple[bool, ...]]]:
    """For each Accelerator and micro-batch: whether it synchronises, the weight moves, and the schedule advances."""
    kinds = [PACKAGES[package].Accelerator(cpu=True, gradient_accumulation_steps=2) for _ in range(2)]
    trained = {name: (one, *prepared(one)) for name, one in zip(("generator", "critic"), kinds, strict=True)}
    seen: dict[str, list[tuple[bool, ...]]] = {name: [] for name in trained}
    for _ in range(4):
        for name, (accelerator, model, optimizer, scheduler) in trained.items():
            before, rate = model.weight.item(), scheduler.get_last_lr()
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen[name].append(
                    (accelerator.sync_gradients, model.weight.item() != before, scheduler.get_last_lr() != rate)
                )
    return seen


def test_each_synchronises_in_its_own_second_micro_batch_as_in_the_original() -> None:
    expected = [(False, False, False), (True, True, True)] * 2
    assert alternating("ours") == alternating("original") == {"generator": expected, "critic": expected}


def test_what_an_accelerator_prepared_follows_it_whichever_was_used_last() -> None:
    first = accelerate_cpp.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler = prepared(first)
    with first.accumulate(model):
        first.backward(model(torch.ones(1, 1)).sum())
        second = accelerate_cpp.Accelerator(gradient_accumulation_steps=3)
        second.sync_gradients = True
        before = model.weight.item()
        optimizer.step()
        scheduler.step()
    assert (model.weight.item(), scheduler.get_last_lr()) == (before, [1.0])
    assert [one.gradient_state.sync_gradients for one in (optimizer, scheduler)] == [False, False]


def test_each_has_its_own_plugin_and_the_shared_state_is_that_of_the_one_used_last() -> None:
    first = accelerate_cpp.Accelerator(cpu=True, gradient_accumulation_steps=2)
    second = accelerate_cpp.Accelerator(gradient_accumulation_steps=3)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert GradientState().num_steps == 3
    with first.accumulate():
        assert (GradientState().num_steps, GradientState().sync_gradients) == (2, False)
    second.backward(torch.ones(1, requires_grad=True).sum())
    assert (GradientState().num_steps, GradientState().sync_gradients) == (3, True)
    assert (first.gradient_state.num_steps, first.sync_gradients, first.step) == (2, False, 1)
    assert isinstance(first.gradient_state, GradientState)
    first.gradient_accumulation_steps = 5
    assert (first.gradient_state.plugin_kwargs["num_steps"], second.gradient_accumulation_steps) == (5, 3)


def test_all_see_the_loader_that_is_being_read() -> None:
    first, second = accelerate_cpp.Accelerator(cpu=True), accelerate_cpp.Accelerator()
    loader = first.prepare(torch.utils.data.DataLoader(torch.arange(2.0)))  # type: ignore[arg-type]
    for _ in loader:
        assert first.gradient_state.active_dataloader is second.gradient_state.active_dataloader is loader
    assert not second.gradient_state.in_dataloader


def test_a_checkpoint_has_the_count_of_its_accelerator_and_loads_it_into_one_alone(tmp_path: Path) -> None:
    first = accelerate_cpp.Accelerator(cpu=True, gradient_accumulation_steps=4)
    second = accelerate_cpp.Accelerator(gradient_accumulation_steps=4)
    for accelerator, micro_batches in ((first, 3), (second, 1)):
        for _ in range(micro_batches):
            with accelerator.accumulate():
                pass
        accelerator.save_state(tmp_path / str(micro_batches))
    second.load_state(tmp_path / "3")
    assert (first.step, second.step) == (3, 3)
    second.load_state(tmp_path / "1")
    assert (first.step, second.step) == (3, 1)


def test_prepared_objects_can_be_copied_and_pickled_while_a_loader_is_read() -> None:
    first = accelerate_cpp.Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, optimizer, _ = prepared(first)
    loader = first.prepare(torch.utils.data.DataLoader(torch.arange(1.0)))  # type: ignore[arg-type]
    for _ in loader:
        copied = copy.deepcopy(optimizer)
        loaded = pickle.loads(pickle.dumps(optimizer))
    accelerate_cpp.Accelerator(gradient_accumulation_steps=3)
    assert copied.gradient_state.num_steps == optimizer.gradient_state.num_steps == 2
    assert loaded.gradient_state.num_steps == 2  # the Accelerator that was the last one then
