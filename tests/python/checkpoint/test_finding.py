"""Where the next checkpoint goes, and which one is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from accelerate_cpp.checkpoint.finding import common_numbers, given, newest_whole, next_iteration, target_of
from accelerate_cpp.checkpoint.manifest import Manifest, why_not_whole
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils.dataclasses import ProjectConfiguration


def project(folder: Path | None, iteration: int = 0, automatic: bool = True) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=automatic, iteration=iteration)


def whole(folder: Path, number: int) -> Path:
    path = folder / "checkpoints" / f"checkpoint_{number}"
    path.mkdir(parents=True)
    Manifest(number + 1, 1, {}, []).write(path)
    return path


def wrong(path: Path) -> str | None:
    return why_not_whole(path, Participants())


def test_checkpoints_are_numbered_below_the_project(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "checkpoint_4"
    assert target_of(project(tmp_path, 4), "ignored") == target
    target.mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint_4 already exists; continue with load_state"):
        target_of(project(tmp_path, 4), None)


def test_without_numbers_a_folder_has_to_be_given(tmp_path: Path) -> None:
    assert target_of(project(tmp_path, automatic=False), tmp_path / "x") == tmp_path / "x"
    with pytest.raises(InvalidArgument, match="needs output_dir"):
        target_of(project(tmp_path, automatic=False), None)
    with pytest.raises(InvalidArgument, match="needs input_dir"):
        newest_whole(project(tmp_path, automatic=False), Participants(), wrong)
    with pytest.raises(InvalidArgument, match="project_dir"):
        target_of(project(None), None)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (9, 10, 11):
        whole(tmp_path, number)
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_12").mkdir()  # nothing in it
    (tmp_path / "checkpoints" / "checkpoint_11" / "accelerate_cpp.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert newest_whole(project(tmp_path), Participants(), wrong).name == "checkpoint_10"
    assert "checkpoint_12 is incomplete" in caplog.text
    assert next_iteration(project(tmp_path), 11) == 13


def test_no_whole_checkpoint_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none"):
        newest_whole(project(tmp_path), Participants(), wrong)
    (tmp_path / "checkpoints" / "checkpoint_12").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint_12 has neither"):
        newest_whole(project(tmp_path), Participants(), wrong)


@pytest.mark.parametrize(
    ("known", "common"), [([[1, 2, 5], [2, 3, 5]], [5, 2]), ([[], []], []), ([[4], []], None), ([[4], [5]], None)]
)
def test_only_what_all_see_is_found_and_what_some_see_is_not_passed_over(
    known: list[list[int]], common: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Participants, "together", lambda ranks, what, attempt: known)
    if common is not None:
        assert common_numbers(project(tmp_path), Participants()) == common
        return
    with pytest.raises(
        InvalidArgument, match=r"that all processes see; .*found .* of each: rank 0: 4, rank 1: (none|5)"
    ):
        common_numbers(project(tmp_path), Participants())


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert given(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="there is no folder"):
        given(tmp_path / "none")


@pytest.mark.parametrize(("automatic", "saved", "expected"), [(False, 6, 6), (False, None, 2), (True, 1, 8)])
def test_the_next_number_is_one_that_no_folder_has(
    tmp_path: Path, automatic: bool, saved: int | None, expected: int
) -> None:
    whole(tmp_path, 7)
    assert next_iteration(project(tmp_path, 2, automatic), saved) == expected
