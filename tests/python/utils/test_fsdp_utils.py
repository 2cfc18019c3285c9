"""Sharded checkpoints in torch's distributed format become one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.utils import merge_fsdp_weights

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


def sharded(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("content", [WEIGHTS, {"model": WEIGHTS}])
@pytest.mark.parametrize("safe", [True, False])
def test_the_weights_are_those_of_the_shards(tmp_path: Path, content: dict[str, Any], safe: bool) -> None:
    source = sharded(tmp_path / "shards", content)
    merge_fsdp_weights(source, tmp_path / "out", safe_serialization=safe)
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == ("model.safetensors" if safe else "pytorch_model.bin")
    merged = load_file(path) if safe else torch.load(path, weights_only=True)
    assert merged.keys() == WEIGHTS.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in WEIGHTS.items())
    assert source.is_dir()


def test_the_shards_are_removed_when_asked(tmp_path: Path) -> None:
    source = sharded(tmp_path / "shards", WEIGHTS)
    merge_fsdp_weights(source, tmp_path, remove_checkpoint_dir=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_folder_is_refused_and_the_right_one_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"found no file \.metadata; pass the folder that torch"):
        merge_fsdp_weights(tmp_path, tmp_path)
    sharded(tmp_path / "pytorch_model_fsdp_0", WEIGHTS)
    with pytest.raises(InvalidArgument, match=r"pass .*pytorch_model_fsdp_0$"):
        merge_fsdp_weights(tmp_path, tmp_path)


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    source = sharded(tmp_path / "shards", WEIGHTS)
    for part in source.glob("*.distcp"):
        part.unlink()
    with pytest.raises(CheckpointError, match="a part may be missing"):
        merge_fsdp_weights(source, tmp_path / "out", remove_checkpoint_dir=True)
    assert list((tmp_path / "out").iterdir()) == []
    assert source.is_dir()
