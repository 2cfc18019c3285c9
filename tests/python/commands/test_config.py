"""accelerate-cpp config: what it writes, completes and explains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate_cpp.commands import config
from accelerate_cpp.commands.config import default_values, host_resources, write_basic_config
from accelerate_cpp.config import file
from accelerate_cpp.devices.cores import Place
from accelerate_cpp.errors import InvalidArgument

CONFIG = ("-m", "accelerate_cpp.commands.accelerate_cli", "config")


def run(*arguments: str, folder: Path, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *CONFIG, *arguments],
        input=typed,
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_for_this_machine_is_written_once_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    written = run("default", "--mixed_precision", "bf16", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert written.returncode == 0
    text = path.read_text()
    assert "mixed_precision: bf16\n" in text
    content = yaml.safe_load(text)
    count = content["num_processes"]
    assert content["use_cpu"] is True
    assert content["distributed_type"] == ("MULTI_CPU" if count > 1 else "NO")
    cores = host_resources.usable_cores()
    assert f"{path}: {count} process{'es' * (count > 1)}, on the CPU with its {cores} core" in written.stdout
    again = run("default", folder=tmp_path)
    assert (again.returncode, path.read_text()) == (0, text)
    assert "was not changed" in again.stdout


@pytest.mark.parametrize(("cores", "nodes", "processes"), [(1, 1, 1), (2, 1, 2), (64, 1, 2), (64, 4, 4), (3, 4, 3)])
def test_processes_on_the_cpu_are_one_for_each_node_and_two_where_there_is_one(
    cores: int, nodes: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_resources, "usable_cores", lambda: cores)
    places = {core: Place(core % nodes, 0, core) for core in range(max(cores, nodes))}
    monkeypatch.setattr(config, "read_places", lambda _: places)
    assert config._processes_for_cores() == processes


def test_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_resources, "gpu_count", lambda: 4)
    values = default_values("fp16")
    assert (values["distributed_type"], values["num_processes"], values["use_cpu"]) == ("MULTI_GPU", 4, False)
    monkeypatch.setattr(host_resources, "gpu_count", lambda: 1)
    assert default_values("no")["distributed_type"] == "NO"


def write_basic_config_as_json(folder: Path) -> str:
    written = write_basic_config(save_location=folder / "c.json")
    assert isinstance(written, Path)
    return written.read_text()


def test_the_function_returns_the_path_or_false(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    assert write_basic_config("BF16", path) == path
    assert file.load(path).given["mixed_precision"] == "bf16"
    assert file.load(path).given["num_processes"] == max(1, host_resources.gpu_count())
    assert json.loads(write_basic_config_as_json(tmp_path))["mixed_precision"] == "no"
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
    assert sorted(done.stdout.splitlines()) == ["0 2 fp8 AO True", "1 2 fp8 AO True"]


def test_answers_are_typed_where_there_is_no_terminal(tmp_path: Path) -> None:
    done = run(folder=tmp_path, typed="MULTI_CPU\n1\n5 \n\n\n\n\nfp17\nbf16\n", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "'fp17': expected one of no, fp16, bf16, fp8" in done.stdout
    assert "There are no questions about features that accelerate_cpp does not support yet: " in done.stdout
    written = yaml.safe_load((tmp_path / "accelerate" / "default_config.yaml").read_text())
    assert (written["distributed_type"], written["num_processes"], written["use_cpu"]) == ("MULTI_CPU", 5, True)
    assert (written["mixed_precision"], written["num_machines"]) == ("bf16", 1)


def test_the_questions_write_what_the_original_accepts(tmp_path: Path) -> None:
    original = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "c.yaml"
    typed = "MULTI_CPU\n2\n1\nnode-0\n\nno\nc10d\n4\n\n\n\n\nbf16\n"
    done = run("--config_file", str(path), folder=tmp_path, typed=typed, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    config = original.load_config_from_file(str(path))
    assert (config.num_machines, config.machine_rank, config.rdzv_backend) == (2, 1, "c10d")
    assert (config.main_process_ip, config.main_process_port, config.num_processes) == ("node-0", 29500, 4)


@pytest.mark.parametrize("before", [None, "distributed_type: MULTI_CPU\nnum_processes: 7\n"])
def test_nothing_is_written_before_the_last_answer(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    if before is not None:
        path.write_text(before)
    done = run("--config_file", str(path), folder=tmp_path, typed="NO\n")
    assert done.returncode == 2
    assert "the input ended before all questions were answered, so nothing was written" in done.stderr
    assert (path.read_text() if path.exists() else None) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if before is None else ["c.yaml"])


def test_an_earlier_file_is_suggested_and_its_other_keys_stay(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 7\nfsdp_config:\n  fsdp_version: 2\ntpu_zone: x\n")
    done = run("--config_file", str(path), folder=tmp_path, typed="\n" * 20)
    assert done.returncode == 0, done.stderr
    given = file.load(path).given
    assert (given["distributed_type"], given["num_processes"]) == ("MULTI_CPU", 7)
    assert (given["fsdp_config"], given["tpu_zone"]) == ({"fsdp_version": 2}, "x")
    assert "kept from the existing file: fsdp_config, tpu_zone" in done.stdout


def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: 'NO'\nnot_a_key: 1\n")
    done = run("--config_file", str(path), folder=tmp_path, typed="\n" * 20)
    assert (done.returncode, path.read_text()) == (2, "distributed_type: 'NO'\nnot_a_key: 1\n")
    assert "unknown key not_a_key" in done.stderr
    assert "distributed_type [" not in done.stdout


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    done = run("--config_file", str(tmp_path / "a" / "c.yaml"), folder=tmp_path, typed="\n" * 20)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "name another file with --config_file" in done.stderr


def test_a_file_of_answers_stands_for_all_questions(tmp_path: Path) -> None:
    (tmp_path / "answers.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
    path = tmp_path / "c.json"
    done = run("--answers", "answers.yaml", "--config_file", str(path), folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"accelerate-cpp config: wrote {path}\n")
    assert json.loads(path.read_text())["num_processes"] == 3
    (tmp_path / "answers.yaml").write_text("num_proceses: 2\n")
    refused = run("--answers", "answers.yaml", "--config_file", str(path), folder=tmp_path)
    assert (refused.returncode, json.loads(path.read_text())["num_processes"]) == (2, 3)
    assert "the nearest known key is num_processes" in refused.stderr


@pytest.mark.parametrize("what", ["default", "update", "explain"])
def test_answers_are_refused_where_nothing_is_asked(what: str, tmp_path: Path) -> None:
    refused = run("--answers", "answers.yaml", what, folder=tmp_path)
    assert (refused.returncode, list(tmp_path.iterdir())) == (2, [])
    assert f"`config {what}` does not ask any" in refused.stderr


def test_a_file_may_be_named_before_or_after_what_to_do_with_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
    for arguments in (("--config_file", str(path), "explain"), ("explain", "--config_file", str(path))):
        assert f"{path}: num_processes" in run(*arguments, folder=tmp_path).stdout
    for arguments in (("--config_file", str(path), "update"), ("update", "--config_file", str(path))):
        assert run(*arguments, folder=tmp_path).stdout == f"accelerate-cpp config: completed {path}\n"
    assert "already exists" in run("--config_file", str(path), "default", folder=tmp_path).stdout


def test_the_questions_are_a_module_to_run_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate_cpp.commands.config", "--config_file", "c.yaml"]
    done = subprocess.run(command, cwd=tmp_path, input="\n" * 20, capture_output=True, text=True, check=False)
    assert (done.returncode, file.load(tmp_path / "c.yaml").given["num_machines"]) == (0, 1)


def test_on_a_terminal_menus_and_typed_lines_follow_each_other(terminal: Callable[..., Any], tmp_path: Path) -> None:
    program = terminal(*CONFIG, HF_HOME=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    program.expect("MULTI_GPU")
    program.send("\x1b[B\r")
    for question, answer in (
        ("num_machines [1]: ", "two\n"),
        ("expected an integer of at least 1", "\n"),
        ("num_processes [2]: ", "4\n"),
        ("parallelism_config [no]: ", "y\n"),
        ("parallelism_config_tp_size [1]: ", "3\n"),
        ("expected a divisor of 4", "2\n"),
        ("parallelism_config_pp_size [1]: ", "\n"),
        ("parallelism_config_cp_size [1]: ", "\n"),
        ("parallelism_config_dp_replicate_size [2]: ", "\n"),
        ("enable_cpu_affinity [no]: ", "y\n"),
        ("debug [no]: ", "\n"),
        ("8  TVM", "\r"),
        ("4  fp8", "jj\r"),
    ):
        program.expect(question)
        program.send(answer)
    assert program.ended() == 0
    assert program.modes() == program.modes_before
    given = file.load(tmp_path / "accelerate" / "default_config.yaml").given
    assert (given["distributed_type"], given["num_processes"], given["mixed_precision"]) == ("MULTI_CPU", 4, "bf16")
    assert (given["enable_cpu_affinity"], given["debug"]) == (True, False)
    assert given["parallelism_config"]["parallelism_config_tp_size"] == 2
    assert given["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.parametrize(("keys", "until"), [("", "MULTI_GPU"), ("2\r", "num_machines [1]: ")])
def test_ctrl_c_ends_the_questions_and_writes_nothing(
    keys: str, until: str, terminal: Callable[..., Any], tmp_path: Path
) -> None:
    program = terminal(*CONFIG, HF_HOME=str(tmp_path))
    program.expect("MULTI_GPU")
    program.send(keys)
    if keys:
        program.expect(until)
    program.send("\x03")
    assert program.ended() == 130
    assert "nothing was written" in program.seen
    assert "Traceback" not in program.seen
    assert program.modes() == program.modes_before
    assert list(tmp_path.iterdir()) == []
