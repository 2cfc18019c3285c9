"""Whether the C++ module fits the torch that is installed is known before anything is loaded or started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_pin
from accelerate_cpp import _build_info, installation
from accelerate_cpp.installation import (
    built_for,
    installed_torch,
    is_too_old,
    minor_of,
    obstacle,
    require_fitting_torch,
    torch_folder,
)

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("installed", ["2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.0a0+git123"])
def test_the_same_minor_version_fits(installed: str) -> None:
    assert obstacle("2.13.0", installed) is None


@pytest.mark.parametrize("installed", ["2.12.1", "2.14.0+cpu", "3.13.0", "2.130.0"])
def test_another_minor_version_is_refused_with_both_commands(installed: str) -> None:
    sentence = obstacle("2.13.0", installed)
    assert sentence is not None
    assert sentence.startswith(f"accelerate_cpp was built for torch 2.13.0, but torch {installed} is installed: run ")
    assert "`accelerate-cpp rebuild`" in sentence
    assert '`pip install "torch==2.13.*"`' in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("built", "torch", "words"),
    [
        (None, "2.13.0", "accelerate_cpp was not built"),
        (None, None, "accelerate_cpp was not built"),
        ("2.13.0", None, 'finds no torch: run `pip install "torch==2.13.*"`'),
        ("2.13.0", "2.8.2", "needs torch 2.9 or newer, but torch 2.8.2 is installed"),
        ("2.13.0", "1.13.0", "needs torch 2.9 or newer, but torch 1.13.0 is installed"),
    ],
)
def test_other_obstacles_have_sentences_of_their_own(built: str | None, torch: str | None, words: str) -> None:
    sentence = obstacle(built, torch)
    assert sentence is not None
    assert words in sentence
    assert "rebuild" not in sentence


def test_the_torch_of_this_interpreter_is_known_as_it_knows_itself() -> None:
    import torch

    assert installed_torch() == torch.__version__
    assert torch_folder() == Path(torch.__file__).parent
    assert built_for() == _build_info.TORCH_VERSION
    require_fitting_torch()


def test_versions_are_compared_by_their_numbers() -> None:
    assert minor_of("2.130.1+cpu") == "2.130"
    assert [version for version in ("1.13.0", "2.8.0", "2.9.0", "2.100.0", "3.0.0") if is_too_old(version)] == [
        "1.13.0",
        "2.8.0",
    ]


def test_the_package_and_its_build_accept_the_same_versions() -> None:
    assert installation.OLDEST_TORCH == torch_pin.OLDEST_TORCH


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs a command where the installed torch is another one, which must not be imported."""

    def run(version: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "packages" / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        if version is not None:
            (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\ncuda = None\n")
        return subprocess.run(
            [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(folder.parent)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("arguments", [("launch", "train.py"), ("check", "train.py"), ("test",)], ids=lambda it: it[0])
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.99.0+cu150", "but torch 2.99.0+cu150 is installed: run `accelerate-cpp rebuild`"),
        ("2.8.0", "needs torch 2.9 or newer, but torch 2.8.0 is installed"),
        (None, "finds no torch"),
    ],
    ids=["other", "old", "none"],
)
def test_commands_refuse_another_torch_in_one_line_before_anything_starts(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], version: str | None, words: str
) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    done = command(version, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists()


def test_env_shows_the_obstacle_and_the_rest(command: Command) -> None:
    done = command("2.99.0", "env")
    assert done.returncode == 0
    assert "- C++ module: accelerate_cpp was built for torch " in done.stdout
    assert "run `accelerate-cpp rebuild`" in done.stdout
    assert "- platform: " in done.stdout


def test_a_program_that_is_not_of_this_python_may_have_any_torch(command: Command) -> None:
    assert command("2.99.0", "launch", "--cpu", "--no_python", "echo", "started").stdout == "started\n"


def test_a_dry_run_needs_no_torch(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = command(None, "launch", "--cpu", "--dry_run", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
