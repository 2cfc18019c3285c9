"""What is saved goes into the folder of the check, and is found there."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.saving import Saving

Found = Callable[[], dict[str, str]]


class Counter:
    """Something with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_files_go_elsewhere_and_are_read_from_there(observed: Observed, tmp_path: Path) -> None:
    saving = Saving(observed, tmp_path / "saved")
    (tmp_path / "model.pt").write_text("precious")
    assert saving.written(tmp_path / "model.pt") == tmp_path / "model.pt"
    place = Path(saving.elsewhere(tmp_path / "model.pt"))
    assert place.is_relative_to(tmp_path / "saved")
    place.write_text("new")
    assert Path(saving.written(tmp_path / "model.pt")).read_text() == "new"
    assert saving.elsewhere(place) == place
    assert (tmp_path / "model.pt").read_text() == "precious"


def test_open_files_stay_what_they_are(observed: Observed, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    assert Saving(observed, tmp_path).elsewhere(buffer) is buffer
    assert Saving(observed, tmp_path).written(buffer) is buffer


def save(observed: Observed, folder: Path, registered: list[Any], counter: Any) -> list[Any]:
    accelerator = observed.accelerators[0]
    accelerator._custom_objects = registered
    accelerator.project_configuration = SimpleNamespace(project_dir=str(folder / "project"))
    folders: list[Any] = []
    Saving(observed, folder / "saved").save_state(
        accelerator, lambda own, output: folders.append((output, own.project_configuration.project_dir)), "state"
    )
    assert accelerator.project_configuration.project_dir == str(folder / "project")
    assert counter is not None
    return folders


def test_the_project_is_elsewhere_while_a_state_is_saved(observed: Observed, tmp_path: Path) -> None:
    (output, project), *_ = save(observed, tmp_path, [], object())
    assert Path(output).is_relative_to(tmp_path / "saved")
    assert Path(project).is_relative_to(tmp_path / "saved")


def test_objects_with_a_state_that_are_not_registered_are_named(
    observed: Observed, found: Found, tmp_path: Path
) -> None:
    counter = Counter()
    save(observed, tmp_path, [counter], counter)
    assert found() == {}
    save(observed, tmp_path, [], counter)
    assert found() == {"unsaved-state": "warning"}


def test_a_script_that_trains_and_saves_nothing_is_noted(observed: Observed, found: Found, tmp_path: Path) -> None:
    saving = Saving(observed, tmp_path)
    observed.steps_of[0] = 2
    saving.conclude(has_ended=False)
    assert found() == {}
    saving.conclude(has_ended=True)
    assert found() == {"never-saved": "note"}
