"""accelerate-cpp merge-weights: what it writes is tested with the function that it calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "merge-weights", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_flags_choose_the_format_and_what_becomes_of_the_shards(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    done = run(tmp_path / "shards", tmp_path / "out", "--unsafe_serialization", "--remove_checkpoint_dir")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "out" / "pytorch_model.bin")["a"].tolist() == [1, 1]
    assert not (tmp_path / "shards").exists()


def test_a_folder_without_shards_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert ".metadata" in done.stderr
