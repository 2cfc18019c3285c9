from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp import __version__
from accelerate_cpp.commands import accelerate_cli


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_launch_is_a_sub_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    result = _run("launch", "--cpu", "--num_processes", "2", "train.py", "--lr", "1", cwd=tmp_path)
    assert result.stdout.splitlines() == ["2 ['--lr', '1']"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lunch",), "there is no command 'lunch'; did you mean launch? (commands: check, config, "),
        (("xyz",), "there is no command 'xyz' (commands: check, config, "),
        (("train.py", "--lr", "1"), "to run a script: accelerate-cpp launch train.py --lr 1"),
        (("--verbose",), "unknown flag --verbose; the nearest known flag is --version"),
        (("--", "env"), "command"),
        (("launch", "--gpus", "2", "x.py"), "accelerate-cpp launch: unknown flag --gpus"),
    ],
)
def test_bad_command_is_refused_in_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_version_is_told_with_that_of_torch() -> None:
    import torch

    result = _run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"accelerate-cpp {__version__} (built for torch {torch.__version__.partition('+')[0]})\n"


def test_command_alone_shows_the_help() -> None:
    result = _run()
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout == _run("--help").stdout


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate-cpp", "--help"])
    with pytest.raises(SystemExit) as end:
        accelerate_cli.main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name, *_ in accelerate_cli.COMMANDS if name not in shown] == []


@pytest.mark.parametrize("command", [name for name, *_ in accelerate_cli.COMMANDS])
def test_each_command_has_its_own_parser(command: str) -> None:
    result = _run(command, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: accelerate-cpp {command} ")
    assert len(result.stdout.splitlines()) > 5


def test_only_the_command_that_is_asked_for_is_loaded() -> None:
    script = """
import sys
from accelerate_cpp.commands import accelerate_cli
sys.argv = ["accelerate-cpp", *sys.argv[1:]]
try:
    accelerate_cli.main()
except SystemExit:
    print(sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("accelerate_cpp.commands.")))
"""

    def loaded(*arguments: str) -> str:
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    assert loaded("--help") == "['accelerate_cli', 'utils']"
    assert loaded("tpu-config", "--help") == "['accelerate_cli', 'launch', 'tpu', 'utils']"
