from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.frameworks import tree_checkpoint
from accelerate_cpp.frameworks.tree_checkpoint import FILE_NAME, Expected

pytestmark = pytest.mark.usefixtures("fresh_state")


def expected_of(tensors: dict[str, torch.Tensor]) -> dict[str, Expected]:
    return {name: Expected(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


TENSORS = {
    "params/w": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "params/b": torch.tensor([1.5, float("nan")], dtype=torch.float64),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8) if one[name].ndim else one[name], other[name].view(torch.uint8))
        if one[name].ndim
        else torch.equal(one[name], other[name])
        for name in one
    )


def test_what_is_loaded_is_what_was_saved_and_safetensors_reads_it(tmp_path: Path) -> None:
    tree_checkpoint.save(tmp_path / "one", TENSORS)
    assert same(tree_checkpoint.load(tmp_path / "one", expected_of(TENSORS)), TENSORS)
    assert same(load_file(tmp_path / "one" / FILE_NAME), TENSORS)


def test_two_names_of_one_memory_are_two_arrays(tmp_path: Path) -> None:
    shared = torch.ones(3)
    tensors = {"params": shared, "average": shared}
    tree_checkpoint.save(tmp_path / "one", tensors)
    assert same(tree_checkpoint.load(tmp_path / "one", expected_of(tensors)), tensors)


def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    tree_checkpoint.save(tmp_path / "one", TENSORS)
    later = {"w": torch.zeros(2)}
    tree_checkpoint.save(tmp_path / "one", later)
    assert same(tree_checkpoint.load(tmp_path / "one", expected_of(later)), later)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_current_folder_gets_the_files_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for tensors in ({"a": torch.zeros(1)}, TENSORS):
        tree_checkpoint.save(".", tensors)
    assert Path.cwd() == tmp_path
    assert same(tree_checkpoint.load(tmp_path, expected_of(TENSORS)), TENSORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_NAME, FILE_NAME]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names.pop("step"), "missing nothing, not expected 'step'"),
        (lambda names: names.update(extra=Expected((), torch.int64)), "missing 'extra', not expected nothing"),
        (lambda names: names.update(step=Expected((1,), torch.int64)), r"'step' has shape \(\) and torch.int64"),
        (lambda names: names.update(step=Expected((), torch.int32)), "and torch.int32; load it into a tree like"),
    ],
)
def test_another_tree_is_refused_with_the_name_that_does_not_fit(change: object, message: str, tmp_path: Path) -> None:
    tree_checkpoint.save(tmp_path / "one", TENSORS)
    names = expected_of(TENSORS)
    change(names)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        tree_checkpoint.load(tmp_path / "one", names)


def test_a_damaged_file_and_a_folder_of_something_else_are_refused(tmp_path: Path) -> None:
    tree_checkpoint.save(tmp_path / "one", TENSORS)
    path = tmp_path / "one" / FILE_NAME
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="expected checksum"):
        tree_checkpoint.load(tmp_path / "one", expected_of(TENSORS))
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="written by something else"):
        tree_checkpoint.load(tmp_path / "other", expected_of(TENSORS))
    with pytest.raises(InvalidArgument, match="there is no folder"):
        tree_checkpoint.load(tmp_path / "none", expected_of(TENSORS))


KILLED = """
import os, signal, sys, torch
from accelerate_cpp.checkpoint import folder, safetensors_file, writing
from accelerate_cpp.frameworks import tree_checkpoint

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

place = {"writing": (safetensors_file.ChecksummedFile, "finish"), "moving": (writing, "commit")}[sys.argv[2]]
setattr(*place, die)
tree_checkpoint.save(sys.argv[1], {"w": torch.zeros(2)})
"""


@pytest.mark.parametrize("moment", ["writing", "moving"])
def test_killed_in_the_middle_it_leaves_the_checkpoint_before(moment: str, tmp_path: Path) -> None:
    tree_checkpoint.save(tmp_path / "one", TENSORS)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "one"), moment])
    assert done.returncode == -signal.SIGKILL
    assert same(tree_checkpoint.load(tmp_path / "one", expected_of(TENSORS)), TENSORS)
    tree_checkpoint.save(tmp_path / "one", TENSORS)  # which clears away what the killed process has left
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
