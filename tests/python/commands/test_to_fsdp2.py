"""accelerate-cpp to-fsdp2: files of FSDP 1 become files of FSDP 2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import accelerate.commands.to_fsdp2 as original
import pytest

from accelerate_cpp.commands import to_fsdp2
from accelerate_cpp.commands.to_fsdp2 import (
    convert_config_to_fsdp2,
    converted_section,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from accelerate_cpp.config import file

Run = Callable[..., CompletedProcess[str]]

TEXT = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_use_orig_params: true\n"


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("HYBRID_SHARD", True),
        ("HYBRID_SHARD_ZERO2", False),
        ("NO_SHARD", False),
    ],
)
def test_a_strategy_says_whether_parameters_are_sharded_again(strategy: str, reshards: bool) -> None:
    expected = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshards}
    assert converted_section({"fsdp_sharding_strategy": strategy}) == expected
    assert converted_section({"fsdp_reshard_after_forward": strategy, "fsdp_version": 1}) == expected


def test_what_has_no_meaning_is_left_out_and_the_rest_stays() -> None:
    section = {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_min_num_params": 5, "own": "kept"}
    assert converted_section(section) == {"fsdp_version": 2, "fsdp_min_num_params": 5, "own": "kept"}


def test_a_file_is_overwritten_only_when_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    refused = run("to-fsdp2", "--config_file", path)
    assert (refused.returncode, path.read_text()) == (2, TEXT)
    assert "pass --overwrite" in refused.stderr
    other = tmp_path / "other.yaml"
    assert run("to-fsdp2", "--config_file", path, "--output_file", other).returncode == 0
    assert path.read_text() == TEXT
    done = run("to-fsdp2", "--config_file", path, "--overwrite")
    assert "fsdp_use_orig_params has no meaning" in done.stderr
    expected = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    assert file.load(path).given["fsdp_config"] == file.load(other).given["fsdp_config"] == expected


def test_programs_are_told_by_the_errors_of_files(tmp_path: Path) -> None:
    given = str(tmp_path / "c.yaml")
    parse = to_fsdp2_command_parser().parse_args
    with pytest.raises(FileNotFoundError):
        to_fsdp2_command(parse(["--config_file", given]))
    (tmp_path / "c.yaml").write_text(TEXT)
    with pytest.raises(FileExistsError, match="pass --overwrite"):
        to_fsdp2_command(parse(["--config_file", given, "--output_file", given]))


@pytest.mark.parametrize("section", ["", "fsdp_config:\n  fsdp_version: 2\n  fsdp_use_orig_params: true\n"])
def test_a_file_without_fsdp_1_stays_as_it_is(run: Run, tmp_path: Path, section: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: FSDP\n{section}")
    before = file.load(path).given
    done = run("to-fsdp2", "--config_file", path, "--overwrite")
    assert (done.returncode, file.load(path).given) == (0, before)
    assert "nothing to convert" in done.stderr


@pytest.mark.parametrize(
    "config",
    [
        {
            "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True, "own": 1},
            "debug": True,
        },
        {"fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}},
        {"fsdp_config": {}},
        {"distributed_type": "NO"},
    ],
)
def test_a_whole_configuration_is_converted_as_by_the_original(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = copy.deepcopy(config)
    expected = original.convert_config_to_fsdp2(copy.deepcopy(config))
    caplog.clear()
    assert convert_config_to_fsdp2(config) == expected
    assert config == before
    assert ("is left out" in caplog.text) is ("own" in str(config))
    assert {record.name for record in caplog.records} == {"accelerate_cpp.commands.to_fsdp2"}


def test_the_command_can_be_called(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    assert to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(path), "--overwrite"])) == 0
    assert file.load(path).given["fsdp_config"]["fsdp_version"] == 2


def test_programs_read_the_file_or_put_another_content_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "c.yaml"
    source.write_text(TEXT)
    assert to_fsdp2.load_config(str(source))["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
    monkeypatch.setattr(to_fsdp2, "load_config", lambda path: {"fsdp_config": {"fsdp_version": 2}})
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(source), "--overwrite"]))
    assert "is for FSDP 2 already" in caplog.text
