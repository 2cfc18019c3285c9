"""Two processes load the newest checkpoint that is whole, whichever of them finds the damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
