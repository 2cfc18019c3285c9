"""accelerate-cpp merge-weights: what it writes is tested with the function that it calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import torch
import torch.distributed.checkpoint as dcp

from accelerate_cpp.commands.merge import merge_command, merge_command_parser

Run = Callable[..., CompletedProcess[str]]


def test_flags_choose_the_format_and_what_becomes_of_the_shards(run: Run, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    done = run(
        "merge-weights", tmp_path / "shards", tmp_path / "out", "--unsafe_serialization", "--remove_checkpoint_dir"
    )
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "out" / "pytorch_model.bin")["a"].tolist() == [1, 1]
    assert not (tmp_path / "shards").exists()


def test_a_folder_without_shards_is_one_sentence(run: Run, tmp_path: Path) -> None:
    done = run("merge-weights", tmp_path, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert ".metadata" in done.stderr


def test_programs_call_it_with_what_its_parser_gives(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert merge_command(merge_command_parser().parse_args([str(tmp_path / "shards"), str(tmp_path / "out")])) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
