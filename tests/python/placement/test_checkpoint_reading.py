"""The files of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.placement.checkpoint_reading import CheckpointFile, checkpoint_files, open_checkpoint

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7)}


def write(path: Path, state: dict[str, Any], **options: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path, **options)
    else:
        torch.save(state, path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("f.safetensors", {}),
        ("f.safetensors", {"metadata": {"format": "pt"}}),
        ("f.bin", {}),
        ("f.pt", {"_use_new_zipfile_serialization": False}),
    ],
)
def test_tensors_are_read_one_by_one(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    file = CheckpointFile(write(tmp_path / name, STATE, **options))
    assert sorted(file) == ["a", "b"]
    assert (file.shape("a"), file.shape("b")) == ((2, 3), ())
    assert (file.read("a").tolist(), file.read("b").item()) == (STATE["a"].tolist(), 7)


def test_what_is_no_tensor_has_no_shape(tmp_path: Path) -> None:
    file = CheckpointFile(write(tmp_path / "f.bin", {"x": {"y": 1}}))
    assert (file.shape("x"), file.read("x")) == (None, {"y": 1})


@pytest.mark.parametrize("name", ["f.safetensors", "f.bin"])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, STATE)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=rf"{name}: expected .*damaged|{name}: expected .*cut short"):
        CheckpointFile(path)


def test_files_of_other_libraries_and_contents_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f.safetensors", STATE, metadata={"format": "tf"})
    with pytest.raises(InvalidArgument, match=r"f\.safetensors: expected tensors of torch .* found format 'tf'"):
        CheckpointFile(path)
    torch.save([1], tmp_path / "f.bin")
    with pytest.raises(CheckpointError, match=r"f\.bin: expected a state dict, found a list"):
        CheckpointFile(tmp_path / "f.bin")


def test_a_tensor_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = CheckpointFile(write(tmp_path / "f.safetensors", STATE))
    with pytest.raises(CheckpointError, match=r"f\.safetensors: the tensor 'nope' cannot be read"):
        file.read("nope")


def shards(folder: Path, index: str = "model.safetensors.index.json", **where: str) -> Path:
    for name, tensor in STATE.items():
        write(folder / f"{name}.safetensors", {name: tensor})
    weight_map = {"a": "a.safetensors", "b": "b.safetensors", **where}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / index


def test_a_folder_has_one_file_or_an_index(tmp_path: Path) -> None:
    index = shards(tmp_path)
    expected = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in (tmp_path, index):
        assert checkpoint_files(path)[0] == expected
        assert [name for file in open_checkpoint(path) for name in file] == ["a", "b"]
    write(tmp_path / "pytorch_model.bin", STATE)
    assert checkpoint_files(tmp_path) == ([tmp_path / "pytorch_model.bin"], {})
    write(tmp_path / "model.safetensors", STATE)
    assert checkpoint_files(tmp_path) == ([tmp_path / "model.safetensors"], {})


def test_where_there_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no/such' does not exist"):
        open_checkpoint(tmp_path / "no" / "such")
    with pytest.raises(InvalidArgument, match=r"expected model\.safetensors.* found none of them"):
        open_checkpoint(tmp_path)
    shards(tmp_path)
    shards(tmp_path, "pytorch_model.bin.index.json")
    with pytest.raises(InvalidArgument, match=r"found model\.safetensors\.index\.json, pytorch_model"):
        open_checkpoint(tmp_path)


def test_an_index_must_fit_its_files(tmp_path: Path) -> None:
    index = shards(tmp_path, c="b.safetensors")
    with pytest.raises(CheckpointError, match=r"'c' is in b\.safetensors, which lacks it and 0 more"):
        open_checkpoint(index)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names files that are not there: a\.safetensors"):
        open_checkpoint(index)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_an_index_names_no_files_outside_of_its_folder(tmp_path: Path, is_absolute: bool) -> None:
    elsewhere = write(tmp_path / "c.safetensors", {"c": torch.zeros(1)})
    (tmp_path / "folder").mkdir()
    index = shards(tmp_path / "folder", c=str(elsewhere) if is_absolute else "../c.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json names '.*c\.safetensors': .* points outside that folder"):
        open_checkpoint(index)


def test_an_index_in_a_hubs_cache_names_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shards(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert sorted(name for file in open_checkpoint(snapshot) for name in file) == ["a", "b"]


@pytest.mark.parametrize("content", ["{nonsense", "[1]", "[" * 100_000])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"x\.index\.json: expected the index"):
        open_checkpoint(tmp_path)


def test_a_name_in_an_index_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.index.json").write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(CheckpointError, match=r"x\.index\.json names 5: expected the name of a file.*it is no text"):
        open_checkpoint(tmp_path)
