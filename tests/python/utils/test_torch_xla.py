"""Installing torch_xla in Colab, with a double of pip."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.utils import install_xla


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In a notebook of Colab; the commands that are run."""
    commands: list[list[str]] = []
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu" if name == "torch" else "")
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command) or SimpleNamespace(returncode=0)
    )
    return commands


@pytest.mark.parametrize(("upgrade", "options"), [(False, []), (True, ["--upgrade"])])
def test_the_version_of_torch_is_installed(pip: list[list[str]], upgrade: bool, options: list[str]) -> None:
    install_xla(upgrade)
    assert pip == [[sys.executable, "-m", "pip", "install", *options, "torch_xla[tpu]==2.9.*"]]


@pytest.mark.usefixtures("pip")
def test_a_failure_of_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, check: SimpleNamespace(returncode=7))
    with pytest.raises(SystemFailure, match=r"torch_xla\[tpu\]==2.9.* failed with exit status 7"):
        install_xla()


def test_it_is_refused_elsewhere(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "google.colab")
    with pytest.raises(InvalidArgument, match="expected a notebook of Google Colab"):
        install_xla()
    assert pip == []
