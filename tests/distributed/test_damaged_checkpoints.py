"""Two processes load the newest checkpoint that is whole, whichever of them finds the damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from killed_saves import SHARDED, Oracle, Training
from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.


def saved_twice(folder: str) -> None:
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    module = torch.nn.Linear(2, 2)
    accelerator.prepare(module, torch.optim.Adam(module.parameters()))
    for value in (1.0, 2.0):
        torch.nn.init.constant_(module.weight, value)
        accelerator.save_state()
    accelerator.end_training()


def loaded(folder: str, given: str | None) -> float | str:
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import CheckpointError
    from accelerate_cpp.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    module = torch.nn.Linear(2, 2)
    accelerator.prepare(module, torch.optim.Adam(module.parameters()))
    torch.nn.init.constant_(module.weight, 7.0)
    try:
        accelerator.load_state(given)
    except CheckpointError as error:
        return f"{error} {module.weight[0, 0].item()}"
    finally:
        accelerator.end_training()
    return module.weight[0, 0].item()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("project")
    run_processes(saved_twice, 2, str(folder))
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_1.pkl", "accelerate_cpp.json"])
def test_an_older_checkpoint_is_loaded_where_the_newest_is_damaged(tmp_path: Path, project: Path, name: str) -> None:
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[: len(content) // 2])
    assert run_processes(loaded, 2, str(tmp_path), None) == [1.0, 1.0]
    for told in run_processes(loaded, 2, str(tmp_path), str(newest)):
        assert name in told
        assert told.endswith(" 7.0")


DAMAGES = ("cut", "flipped", "missing", "empty")


@contextmanager
def damaged(file: Path, damage: str, chance: random.Random) -> Iterator[None]:
    """``file`` is damaged within."""
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "flipped":
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
    else:
        file.write_bytes(content[: chance.randrange(1, len(content)) if damage == "cut" else 0])
    try:
        yield
    finally:
        file.write_bytes(content)


def goes_back_where_the_newest_is_damaged(folder: str, layout: str) -> list[str]:
    """Saves after the first and the second step, and damages the second checkpoint in all ways; returns what failed."""
    from accelerate_cpp.errors import CheckpointError

    training = Training(layout, folder, limit=None)
    run, newest = training.run, Path(folder, "checkpoints", "checkpoint_1")
    for _ in range(2):
        training.step()
        run.save_state()
    names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    chance, failures = random.Random(layout), []
    for number, (name, damage) in enumerate((name, damage) for name in names for damage in DAMAGES):
        context = damaged(newest / name, damage, chance) if run.is_main_process else None
        if context is not None:
            context.__enter__()
        run.wait_for_everyone()
        if name != "accelerate_cpp.json" or damage != "missing":  # without it, it is a folder of the original
            assert run.resume()
            if training.progress.steps != 1:
                failures.append(f"{name} {damage}: step {training.progress.steps} was loaded")
            training.oracle = Oracle()
            training.check()
            try:
                run.load_state(newest)
                failures.append(f"{name} {damage}: was loaded")
            except (CheckpointError, RuntimeError) as error:
                if name not in str(error) or "load another checkpoint" not in str(error):
                    failures.append(f"{name} {damage}: {error}")
            training.check()
        if number % 8 == 0:
            training.step()  # goes on from the older one
            training.check()
        run.wait_for_everyone()
        if context is not None:
            context.__exit__(None, None, None)
        run.wait_for_everyone()
    assert run.resume()
    assert training.progress.steps == 2, "undamaged again"
    training.check()
    return failures


@pytest.mark.parametrize(
    "layout",
    [
        "ZeRO 2",
        *(pytest.param(one, marks=pytest.mark.long) for one in SHARDED if one != "ZeRO 2"),
    ],
)
def test_any_damage_of_shards_and_stages_is_found_and_the_checkpoint_before_is_loaded(
    tmp_path: Path, layout: str
) -> None:
    assert run_processes(goes_back_where_the_newest_is_damaged, 2, str(tmp_path), layout, timeout=600) == [[], []]
