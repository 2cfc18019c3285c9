"""accelerate-cpp config: what it writes, completes and explains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.commands.config import default_values, host, write_basic_config
from accelerate_cpp.config import file
from accelerate_cpp.errors import InvalidArgument


def run(*arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "config", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_for_this_machine_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    assert run("default", "--mixed_precision", "bf16", folder=tmp_path, CUDA_VISIBLE_DEVICES="").returncode == 0
    content = json.loads(path.read_text())
    assert (content["mixed_precision"], content["use_cpu"], content["num_processes"]) == ("bf16", True, 1)
    again = run("default", folder=tmp_path)
    assert (again.returncode, json.loads(path.read_text())) == (0, content)
    assert "stays as it is" in again.stdout


def test_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gpu_count", lambda: 4)
    values = default_values("fp16")
    assert (values["distributed_type"], values["num_processes"], values["use_cpu"]) == ("MULTI_GPU", 4, False)
    monkeypatch.setattr(host, "gpu_count", lambda: 1)
    assert default_values("no")["distributed_type"] == "NO"


def test_the_function_returns_the_path_or_false(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    assert write_basic_config("BF16", path) == path
    assert file.load(path).given["mixed_precision"] == "bf16"
    assert write_basic_config(save_location=str(path)) is False
    assert str(path) in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="expected one of no, fp16, bf16"):
        write_basic_config("fp8", tmp_path / "other.yaml")


def test_a_file_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nfp16: true\n")
    assert run("update", "--config_file", str(path), folder=tmp_path).returncode == 0
    given = file.load(path).given
    assert (given["num_processes"], given["mixed_precision"], given["rdzv_backend"]) == (3, "fp16", "static")
    path.write_text("distributed_type: 'NO'\nnot_a_key: 1\n")
    refused = run("update", "--config_file", str(path), folder=tmp_path)
    assert (refused.returncode, path.read_text()) == (2, "distributed_type: 'NO'\nnot_a_key: 1\n")
    assert "unknown key not_a_key" in refused.stderr


def test_each_setting_is_explained_with_who_says_so(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\n")
    told = run("explain", "--config_file", str(path), "--debug", folder=tmp_path, ACCELERATE_MIXED_PRECISION="no")
    assert told.returncode == 0, told.stderr
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in told.stdout.splitlines()}
    assert rows["num_processes"] == f"3 {path}: num_processes"
    assert rows["mixed_precision"] == "no environment variable ACCELERATE_MIXED_PRECISION"
    assert rows["debug"] == "True --debug"
    assert rows["num_machines"] == "1 default"


def test_a_launch_follows_the_file(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    text = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"
    (tmp_path / "accelerate" / "default_config.yaml").write_text(text)
    names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND", "ACCELERATE_USE_CPU")
    (tmp_path / "train.py").write_text(f"import os\nprint(' '.join(str(os.environ.get(name)) for name in {names}))\n")
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["0 2 fp8 AO true", "1 2 fp8 AO true"]
