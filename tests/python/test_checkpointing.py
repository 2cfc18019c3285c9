"""Checkpoints of the whole state in one process, read and written by this package and by the original."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import accelerate
import accelerate.state
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import accelerate_cpp
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME
from accelerate_cpp.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.utils.dataclasses import ProjectConfiguration

PACKAGES = {"ours": accelerate_cpp, "original": accelerate}


@pytest.fixture(autouse=True)
def _fresh(fresh_states: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which DeepSpeed, if the original loads it, exports


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """A small training run with either package."""

    def __init__(self, package: str = "ours", objects: int = 1, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.accelerator = PACKAGES[package].Accelerator(cpu=True, **options)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        head = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
        loader: DataLoader[Any] = DataLoader(torch.randn(8, 3), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(model, head, optimizer, schedule, loader)
        self.model, self.head, self.optimizer, self.schedule, self.loader = prepared
        self.objects = [Counter(seed + index) for index in range(objects)]
        self.accelerator.register_for_checkpointing(*self.objects)

    def train(self, steps: int = 3) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.head(self.model(torch.randn(4, 3))).square().mean()
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_a_run_continues_as_if_it_had_not_stopped(tmp_path: Path, safe: bool, blocking: bool) -> None:
    run = Run()
    run.train()
    run.accelerator.step, run.objects[0].value = 4, 11
    folder = run.accelerator.save_state(tmp_path / "c", safe_serialization=safe, blocking=blocking)
    assert folder == tmp_path / "c"
    expected = (run.train(), random.random())
    run.accelerator.wait_for_checkpoint()
    other = Run(seed=1)
    other.accelerator.load_state(tmp_path / "c")
    assert (other.accelerator.step, other.objects[0].value) == (4, 11)
    assert (other.train(), random.random()) == expected


@pytest.mark.parametrize(("writer", "reader"), [("ours", "original"), ("original", "ours")])
@pytest.mark.parametrize("safe", [True, False])
def test_each_package_continues_what_the_other_saved(tmp_path: Path, writer: str, reader: str, safe: bool) -> None:
    run = Run(writer)
    run.train()
    run.accelerator.step, run.objects[0].value = 4, 11
    run.accelerator.save_state(str(tmp_path / "c"), safe_serialization=safe)
    expected = (run.train(), random.random())
    other = Run(reader, seed=1)
    other.accelerator.load_state(str(tmp_path / "c"))
    assert (other.accelerator.step, other.objects[0].value) == (4, 11)
    assert (other.train(), random.random()) == expected


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_are_those_of_the_original_and_the_manifest(tmp_path: Path, safe: bool) -> None:
    for package in PACKAGES:
        run = Run(package)
        run.train(1)
        run.accelerator.save_state(str(tmp_path / package), safe_serialization=safe)
    ours, theirs = (set(os.listdir(tmp_path / package)) for package in PACKAGES)
    assert ours == theirs | {MANIFEST_NAME}
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        states = [torch.load(tmp_path / package / name, weights_only=False) for package in PACKAGES]
        assert states[0].keys() == states[1].keys(), name


def test_numbered_checkpoints_are_limited_and_the_newest_is_loaded(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(project_config=project)
    for value in range(3):
        run.objects[0].value = value
        run.accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    run.objects[0].value = 9
    run.accelerator.load_state()
    assert run.objects[0].value == 2
    run.accelerator.project_configuration.iteration = 2
    with pytest.raises(ValueError, match="checkpoint_2 already exists"):
        run.accelerator.save_state()


def test_a_resumed_run_numbers_on_whichever_checkpoint_it_loads(tmp_path: Path) -> None:
    def started() -> Run:
        options = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
        return Run(project_config=ProjectConfiguration(**options))  # type: ignore[arg-type]

    first = started()
    for _ in range(3):
        first.accelerator.save_state()
    second = started()
    second.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert second.accelerator.save_iteration == 3
    assert second.accelerator.save_state().name == "checkpoint_3"


def test_numbered_checkpoints_of_the_original_are_continued(tmp_path: Path) -> None:
    options: dict[str, Any] = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    theirs = Run("original", project_config=accelerate.utils.ProjectConfiguration(**options))
    for value in (1, 2):
        theirs.objects[0].value = value
        theirs.accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "random_states_0.pkl").unlink()
    ours = Run(project_config=ProjectConfiguration(**options))
    ours.accelerator.load_state()
    assert ours.objects[0].value == 1
    assert ours.accelerator.save_state().name == "checkpoint_2"


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    run = Run(project_config=project)
    for value in (5, 6):
        run.objects[0].value = value
        last = run.accelerator.save_state()
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (last / "model.safetensors").write_bytes(content)
    run.accelerator.load_state()
    assert run.objects[0].value == 5
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected checksum"):
        run.accelerator.load_state(last)


def test_hooks_see_and_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    run, seen = Run(), []
    folder = str(tmp_path / "c")

    def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append((len(models), len(weights), output_dir))
        (Path(output_dir) / "by_a_hook").write_text("hook")
        weights.clear()

    handle = run.accelerator.register_save_state_pre_hook(on_save)
    run.accelerator.save_state(folder)
    assert seen == [(2, 2, folder)]
    assert "model.safetensors" not in os.listdir(folder)
    assert (tmp_path / "c" / "by_a_hook").read_text() == "hook"
    handle.remove()
    run.accelerator.save_state(folder)
    assert {"model.safetensors", "by_a_hook"} <= set(os.listdir(folder))
    before = run.head.weight.detach().clone()
    run.head.weight.data.fill_(5.0)
    unhook = run.accelerator.register_load_state_pre_hook(lambda models, input_dir: models.clear())
    run.accelerator.load_state(folder)
    assert run.head.weight.flatten().tolist() == [5.0, 5.0]
    unhook.remove()
    run.accelerator.load_state(folder)
    assert torch.equal(run.head.weight, before)


def test_objects_need_both_methods_and_have_to_be_as_many_as_were_saved(tmp_path: Path) -> None:
    run = Run(objects=2)
    with pytest.raises(ValueError, match=r"Item at index 1, a int"):
        run.accelerator.register_for_checkpointing(Counter(), 3)
    run.accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c" / "custom_checkpoint_1.pkl").is_file()
    other = Run(objects=1)
    before = other.head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="has 2 custom checkpoints, but 1 objects are registered"):
        other.accelerator.load_state(tmp_path / "c")
    assert torch.equal(other.head.weight, before)


def test_a_folder_that_is_missing_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        Run().accelerator.load_state(tmp_path / "none")
    with pytest.raises(ValueError, match="needs input_dir"):
        Run().accelerator.load_state()


def test_a_write_in_the_background_keeps_the_state_of_the_call_and_reports_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from accelerate_cpp.checkpoint import writing as saving

    run, go = Run(), threading.Event()
    write = saving.Checkpoint._write

    def late(*arguments: Any) -> Any:
        go.wait(60)
        return write(*arguments)

    monkeypatch.setattr(saving.Checkpoint, "_write", late)
    expected = run.head.weight.detach().clone()
    run.accelerator.save_state(tmp_path / "c", blocking=False)
    run.head.weight.data.fill_(7.0)
    assert not (tmp_path / "c").exists()
    go.set()
    run.accelerator.load_state(tmp_path / "c")
    assert torch.equal(run.head.weight, expected)

    (tmp_path / "file").touch()
    run.accelerator.save_state(tmp_path / "file" / "c", blocking=False)
    memory = run.accelerator._checkpoints._memory
    assert memory.at_least(0) is not None  # what the copy was in is kept for the next one
    with pytest.raises(OSError, match="file"):
        run.accelerator.end_training()
    assert memory.at_least(0) is None
    run.accelerator.end_training()


def test_the_loss_scale_is_restored(tmp_path: Path) -> None:
    run = Run(mixed_precision="fp16")
    run.accelerator.scaler.update(64.0)
    run.accelerator.save_state(tmp_path / "c")
    assert torch.load(tmp_path / "c" / "scaler.pt")["scale"] == 64.0
    run.accelerator.scaler.update(2.0)
    run.accelerator.load_state(tmp_path / "c")
    assert run.accelerator.scaler.get_scale() == 64.0


def test_loaders_continue_in_the_epoch_that_was_saved(tmp_path: Path) -> None:
    run = Run()
    for _ in range(2):
        for _batch in run.loader:
            pass
    run.accelerator.save_state(tmp_path / "c")
    other = Run()
    other.accelerator.load_state(tmp_path / "c")
    assert other.loader.iteration == 2


@pytest.mark.parametrize("size", ["20KB", "10GB"])
def test_save_model_writes_what_the_original_writes(tmp_path: Path, size: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model[2].weight = model[0].weight
    for package, module in PACKAGES.items():
        module.Accelerator(cpu=True).save_model(model, str(tmp_path / package), max_shard_size=size)
    ours, theirs = ({path.name: path for path in (tmp_path / package).iterdir()} for package in PACKAGES)
    assert ours.keys() == theirs.keys()

    for name, path in ours.items():
        if name.endswith(".json"):
            assert path.read_text() == theirs[name].read_text()
        else:
            mine, other = load_file(path), load_file(theirs[name])
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize("safe", [True, False])
def test_save_model_brings_what_is_offloaded(tmp_path: Path, safe: bool) -> None:
    model, inputs = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)), torch.ones(4, 2)
    accelerator, expected = accelerate_cpp.Accelerator(cpu=True), model(inputs)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_cpp.dispatch_model(
        model, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=tmp_path / "away", force_hooks=True
    )
    assert model[2].weight.is_meta
    accelerator.save_model(model, tmp_path / "saved", safe_serialization=safe)
    assert torch.equal(model(inputs), expected)
    fresh = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    accelerate_cpp.load_checkpoint_in_model(fresh, tmp_path / "saved")
    assert all(torch.equal(value, kept[name]) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("save_model", [True, False])
def test_tensors_that_share_memory_are_saved_once_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_model: bool
) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)
            self.b = self.a

    accelerator, model = accelerate_cpp.Accelerator(cpu=True), Tied()
    if save_model:
        accelerator.save_model(model, tmp_path)
    else:
        accelerator.save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Removed shared tensor ['b.weight', 'b.bias'] while saving")
    accelerator.prepare(model)
    caplog.clear()
    accelerator.save_state(tmp_path / "state")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_save_model_refuses_a_file_and_weights_without_values(tmp_path: Path) -> None:
    accelerator = accelerate_cpp.Accelerator(cpu=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        accelerator.save_model(torch.nn.Linear(1, 1), tmp_path / "file")
    with pytest.raises(RuntimeError, match="meta device"):
        accelerator.save_model(torch.nn.Linear(1, 1, device="meta"), tmp_path / "c")


@pytest.mark.parametrize("safe", [True, False])
def test_save_writes_one_object(tmp_path: Path, safe: bool) -> None:
    accelerator = accelerate_cpp.Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(2)}, tmp_path / "f", safe_serialization=safe)
    loaded = load_file(tmp_path / "f") if safe else torch.load(tmp_path / "f")
    assert torch.equal(loaded["a"], torch.ones(2))
    with (tmp_path / "open").open("wb") as file:
        accelerator.save({"a": 1}, file)
    assert torch.load(tmp_path / "open") == {"a": 1}


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_that_was_loaded_follows_its_file(tmp_path: Path, zipped: bool) -> None:
    run = Run()
    run.train(1)
    folder = run.accelerator.save_state(tmp_path / "c")
    if not zipped:  # as torch wrote before 1.6
        content = torch.load(folder / "optimizer.bin")
        torch.save(content, folder / "optimizer.bin", _use_new_zipfile_serialization=False)
        (folder / MANIFEST_NAME).unlink()
    expected = run.train()
    run.accelerator.load_state(folder)
    with (folder / "optimizer.bin").open("r+b") as file:
        file.write(bytes((folder / "optimizer.bin").stat().st_size))
    assert run.train() == expected


def test_a_file_that_is_still_mapped_is_replaced_and_not_overwritten(tmp_path: Path) -> None:
    save_accelerator_state(tmp_path, [{"a": torch.zeros(2)}], [], [], [], 0, 0)
    mapped = load_file(tmp_path / "model.safetensors")
    save_accelerator_state(tmp_path, [{"a": torch.ones(2)}], [], [], [], 0, 0)
    assert (mapped["a"].tolist(), load_file(tmp_path / "model.safetensors")["a"].tolist()) == ([0, 0], [1, 1])


def test_the_functions_of_the_original_write_and_read_a_folder(tmp_path: Path) -> None:
    run, counter = Run(), Counter(3)
    run.train(1)
    models = [run.model, run.head]
    parts: tuple[Any, ...] = ([run.optimizer], [run.schedule], [run.loader])
    assert save_accelerator_state(str(tmp_path), [one.state_dict() for one in models], *parts, 0, 5) == tmp_path
    save_custom_state(counter, str(tmp_path))
    expected = run.train()
    assert load_accelerator_state(str(tmp_path), models, *parts, 0) == {"step": 5}
    assert run.train() == expected
    counter.value = 0
    load_custom_state(counter, str(tmp_path))
    assert counter.value == 3
    with pytest.raises(TypeError, match="map_location"):
        load_accelerator_state(str(tmp_path), models, *parts, 0, map_location="moon")
