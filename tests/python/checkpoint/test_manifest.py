"""Manifests, and how folders are judged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.files import write_bytes
from accelerate_cpp.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_files,
    check_structure,
    read_manifest,
    why_not_whole,
)
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.safetensors_file import write_safetensors
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.errors import CheckpointError


def written(folder: Path) -> Manifest:
    records = {name: write_bytes(folder / name, name.encode() * 100) for name in ("one", "two")}
    manifest = Manifest(4, 2, records, [{"epoch": 1, "generator": "abc"}])
    manifest.write(folder)
    return manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert why_not_whole(tmp_path, Participants()) is None


def test_a_folder_of_the_original_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, "1" * 5000, "{}", '{"format": 1', '{"format": 1, "xxh3": 5}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        read_manifest(tmp_path)
    assert why_not_whole(tmp_path, Participants()) is not None


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link"])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused_before_they_are_read(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    record = write_bytes(tmp_path / "secret", b"secret")
    (folder / "link").symlink_to("../secret")
    Manifest(1, 1, {name: record}, []).write(folder)
    with pytest.raises(CheckpointError, match=r"outside (that|the) folder"):
        read_manifest(folder)
    assert "Nothing was read" in str(why_not_whole(folder, Participants()))


@pytest.mark.parametrize("name", ["./weights", "a//weights", "a/./weights"])
def test_a_file_has_one_name_in_a_manifest_lest_it_be_read_for_each(tmp_path: Path, name: str) -> None:
    record = write_bytes(tmp_path / "weights", b"secret")
    Manifest(1, 1, {"weights": record, name: record}, []).write(tmp_path)
    with pytest.raises(CheckpointError, match="no name as it is written"):
        read_manifest(tmp_path)


def test_a_manifest_that_was_changed_is_noticed(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_text(path.read_text().replace('"iteration": 4', '"iteration": 5'))
    with pytest.raises(CheckpointError, match="checksum"):
        read_manifest(tmp_path)


def test_a_manifest_of_a_later_version_says_what_to_do(tmp_path: Path) -> None:
    written(tmp_path)
    body = json.loads((tmp_path / MANIFEST_NAME).read_text())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**body, "format": 2}))
    with pytest.raises(CheckpointError, match="update accelerate_cpp"):
        read_manifest(tmp_path)


def test_a_missing_a_short_and_a_changed_file_are_told_apart(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    check_files(tmp_path, manifest)
    (tmp_path / "two").write_bytes(b"X" + b"two" * 100)
    with pytest.raises(CheckpointError, match="two: expected 300 bytes, found 301"):
        check_files(tmp_path, manifest)
    (tmp_path / "two").write_bytes(b"twx" + b"two" * 99)
    with pytest.raises(CheckpointError, match="two: expected checksum"):
        check_files(tmp_path, manifest)
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    check_files(tmp_path, manifest, share=largest_first.index("one"), shares=2)
    (tmp_path / "two").unlink()
    with pytest.raises(CheckpointError, match="two is missing"):
        check_files(tmp_path, manifest)


def test_a_folder_without_manifest_is_judged_by_its_outline(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither .* nor random_states_1\.pkl"):
        check_structure(tmp_path, rank=1)
    write_pickle(tmp_path / "random_states_0.pkl", {})
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.zeros(100)})
    check_structure(tmp_path, rank=1)
    for name in ("random_states_0.pkl", "model.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-50])
        assert name in (why_not_whole(tmp_path, Participants(Topology(1, 2))) or "")
        (tmp_path / name).write_bytes(whole)
    for name in ("meta.pkl", "vocab.bin", "index.safetensors"):  # of the user
        (tmp_path / name).write_bytes(pickle.dumps(["anything"]))
    assert why_not_whole(tmp_path, Participants(Topology(1, 2))) is None
