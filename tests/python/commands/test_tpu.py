"""tpu-config: the command of gcloud, made and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = "distributed_type: XLA\ntpu_name: pod\ntpu_zone: here-1\n"
SSH = ["compute", "tpus", "tpu-vm", "ssh"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a gcloud that writes its arguments down and exits with the number in ``status``, if any."""
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        "pathlib.Path('called.json').write_text(json.dumps(sys.argv[1:]))\n"
        "status = pathlib.Path('status')\nsys.exit(int(status.read_text()) if status.exists() else 0)\n"
    )
    gcloud.chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "tpu-config", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder), "PATH": path or f"{folder}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def called(folder: Path) -> list[str]:
    arguments: list[str] = json.loads((folder / "called.json").read_text())
    return arguments


def test_the_commands_run_on_all_machines_of_the_pod(folder: Path) -> None:
    flags = ("--tpu_name", "pod", "--tpu_zone", "here-1", "--command", "echo 'a b'", "--command", "ls", "pwd")
    done = run(folder, *flags)
    assert done.returncode == 0, done.stderr
    text = "cd /usr/share; echo 'a b'; ls; pwd"
    assert called(folder) == [*SSH, "pod", "--zone", "here-1", "--command", text, "--worker", "all"]


def test_the_file_says_what_flags_do_not(folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS + "commands:\n- ls\n- pwd\n")
    assert run(folder, "--config_file", "c.yaml", "--tpu_zone", "there").returncode == 0
    assert called(folder)[4:8] == ["pod", "--zone", "there", "--command"]
    assert called(folder)[8] == "cd /usr/share; ls; pwd"


def test_a_file_at_the_usual_place_is_found(folder: Path) -> None:
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "default_config.yaml").write_text(SETTINGS + "command_file: setup.sh\n")
    (folder / "setup.sh").write_text("# a comment\nfor x in a b; do\n  echo $x\ndone\n")
    assert run(folder).returncode == 0
    assert called(folder)[8] == "cd /usr/share\n# a comment\nfor x in a b; do\n  echo $x\ndone"


def test_flags_win_over_the_script_of_the_file(folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS + "command_file: no-such-script\n")
    assert run(folder, "--config_file", "c.yaml", "--command", "ls").returncode == 0
    assert called(folder)[8] == "cd /usr/share; ls"


@pytest.mark.parametrize(
    ("version", "package"),
    [
        ((), "accelerate-cpp -U"),
        (("--accelerate_version", "0.1.0"), "accelerate-cpp==0.1.0"),
    ],
)
def test_this_package_is_installed_first_if_asked_for(version: tuple[str, ...], package: str, folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS)
    run(folder, "--config_file", "c.yaml", "--command", "ls", "--install_accelerate", *version)
    assert called(folder)[8] == f"cd /usr/share; pip install {package}; ls"


def test_debug_prints_the_command_for_a_shell_and_runs_nothing(folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS)
    done = run(folder, "--config_file", "c.yaml", "--command", "ls", "--use_alpha", "--debug", path="/nonexistent")
    shown = "gcloud alpha compute tpus tpu-vm ssh pod --zone here-1 --command 'cd /usr/share; ls' --worker all"
    assert (done.returncode, done.stdout) == (0, f"Running {shown}\n")
    assert not (folder / "called.json").exists()


def test_a_failure_of_gcloud_is_the_exit_status(folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS)
    (folder / "status").write_text("3")
    done = run(folder, "--config_file", "c.yaml", "--command", "ls")
    assert (done.returncode, done.stdout) == (3, "")
    assert "gcloud failed with exit status 3" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--command", "ls", "--tpu_zone", "z"), "tpu_name is unknown: pass --tpu_name"),
        (("--command", "ls", "--tpu_name", "n"), "tpu_zone is unknown"),
        (("--tpu_name", "n", "--tpu_zone", "z"), "nothing to run: pass --command or --command_file"),
        (("--tpu_name", "n", "--tpu_zone", "z", "--command", "ls", "--command_file", "x"), "exclude each other"),
        (("--tpu_name", "n", "--tpu_zone", "z", "--command_file", "no-such"), "no-such cannot be read"),
        (("--tpu_name", "n", "--tpu_zone", "z", "--command_file", "empty"), "empty is empty"),
        (
            (
                *("--tpu_name", "n", "--tpu_zone", "z", "--command", "ls"),
                "--install_accelerate",
                *("--accelerate_version", "1; rm"),
            ),
            "expected a version such as 0.1.0, or latest",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(arguments: tuple[str, ...], words: str, folder: Path) -> None:
    (folder / "empty").touch()
    done = run(folder, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr
    assert not (folder / "called.json").exists()


def test_a_missing_gcloud_is_one_sentence(folder: Path) -> None:
    (folder / "c.yaml").write_text(SETTINGS)
    done = run(folder, "--config_file", "c.yaml", "--command", "ls", path="/nonexistent")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no gcloud in PATH" in done.stderr
