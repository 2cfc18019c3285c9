"""Which files a checkpoint may name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.checkpoint.containment import own_file, path_within, why_impossible
from accelerate_cpp.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint" / "part").mkdir(parents=True)
    for path in ("secret", "checkpoint/one", "checkpoint/part/two"):
        (tmp_path / path).write_text(path)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("name", ["one", "./one", "part/two", "missing", "..one"])
def test_files_of_the_folder_may_be_named(folder: Path, name: str) -> None:
    assert path_within(folder, name, folder / "index.json") == folder / name


@pytest.mark.parametrize("name", ["../secret", "part/../../secret", "part/../one", "..", "/etc/passwd"])
def test_names_that_lead_out_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"index\.json names '.*': expected the name of a file in .*points outside"
    ):
        path_within(folder, name, folder / "index.json")


def test_links_may_lead_to_other_files_of_the_folder_and_no_further(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink("part/two", folder / "inside")
    os.symlink("../secret", folder / "outside")
    os.symlink("..", folder / "up")
    assert path_within(folder, "inside", folder / "index.json").read_text() == "checkpoint/part/two"
    for name in ("outside", "up/secret"):
        with pytest.raises(
            CheckpointError, match=r"which index\.json names, is a link to .*secret, outside the folder"
        ):
            path_within(folder, name, folder / "index.json")
    monkeypatch.chdir(folder)
    assert path_within(Path("."), "inside", Path("index.json")) == Path("inside")


def test_folder_that_is_a_link_itself_is_a_folder(folder: Path) -> None:
    os.symlink(folder, folder.parent / "link")
    assert path_within(folder.parent / "link", "one", folder / "index.json").is_file()


@pytest.mark.parametrize("inner", [".", "part"])
def test_snapshots_of_a_hubs_cache_have_links_to_its_blobs(tmp_path: Path, inner: str) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_text("weights")
    folder = tmp_path / "models--a--b" / "snapshots" / "main" / inner
    folder.mkdir(parents=True)
    os.symlink(os.path.relpath(blob, folder), folder / "one")
    os.symlink("/etc/passwd", folder / "two")
    assert path_within(folder, "one", folder / "index.json").read_text() == "weights"
    with pytest.raises(CheckpointError, match="outside the folder"):
        path_within(folder, "two", folder / "index.json")


def test_a_folder_downloaded_to_may_have_links_to_blobs_of_a_hubs_cache(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "models--a--b"
    for name in ("blobs/0123", "blobs/sub/0123", "refs/main"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text("weights")
        os.symlink(cache / name, folder / name.replace("/", "-"))
    with pytest.raises(CheckpointError, match="outside the folder"):
        own_file(folder, "blobs-0123")  # no cache: there are no snapshots beside it
    (cache / "snapshots").mkdir()
    assert own_file(folder, "blobs-0123").read_text() == "weights"
    for name in ("blobs-sub-0123", "refs-main"):
        with pytest.raises(CheckpointError, match="outside the folder"):
            own_file(folder, name)


def test_files_with_a_fixed_name_may_be_links_to_files_of_the_folder_and_no_further(folder: Path) -> None:
    os.symlink("part/two", folder / "model.safetensors")
    os.symlink("../secret", folder / "optimizer.bin")
    os.symlink("..", folder / "up")
    assert own_file(folder, "model.safetensors").read_text() == "checkpoint/part/two"
    assert own_file(folder, "missing") == folder / "missing"
    for name in ("optimizer.bin", "up", "up/secret"):
        with pytest.raises(CheckpointError, match=rf"checkpoint/{name} is a link to .*, outside the folder"):
            own_file(folder, name)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, 7, None, ["one"]])
def test_what_can_be_the_name_of_no_file_is_refused(folder: Path, name: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"index\.json names .*: expected the name of a file, but no file can have"
    ):
        path_within(folder, name, folder / "index.json")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_what_can_be_no_name_is_no_name_of_an_own_file_either(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"should contain .*: expected the name of a file, but no file can have"):
        own_file(folder, name)
    assert why_impossible(name)
    assert why_impossible(folder / name)
    assert why_impossible(folder / "missing" / "one") == ""
