"""The build finds the torch of the environment it installs into, and pins it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import backend
import torch_pin
from torch_pin import Torch, TorchPin, find_torch, read_torch


def make_torch(site_folder: Path, version: str = "2.13.0+cpu") -> Path:
    folder = site_folder / "torch"
    for name in ("include", "lib"):
        (folder / name).mkdir(parents=True)
    (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n")
    return folder


@pytest.fixture
def only_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packages folder that is the only place where torch is looked for."""
    monkeypatch.setattr(torch_pin, "site_folders", lambda: iter([tmp_path]))
    monkeypatch.delenv(torch_pin.FOLDER_VARIABLE, raising=False)
    return tmp_path


def test_the_torch_of_this_interpreter_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(torch_pin.FOLDER_VARIABLE, raising=False)
    import torch

    assert find_torch() == Torch(Path(torch.__file__).resolve().parent, torch.__version__)


def test_an_isolated_build_looks_in_the_environment_it_installs_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pin.importlib.util, "find_spec", lambda name: None)
    platlib = Path(torch_pin.sysconfig.get_path("platlib"))
    assert next(torch_pin.site_folders()) == platlib


def test_a_virtual_environment_with_system_packages_also_looks_in_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = x\ninclude-system-site-packages = true\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    base = Path(torch_pin.sysconfig.get_path("platlib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix}))
    assert base in list(torch_pin.site_folders())


def test_no_torch_is_one_sentence_that_says_what_to_do(only_in: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        backend.get_requires_for_build_wheel()
    assert "pip install torch" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_torch_without_headers_is_not_taken(only_in: Path) -> None:
    (make_torch(only_in) / "include").rmdir()
    assert read_torch(only_in / "torch") is None
    with pytest.raises(SystemExit):
        find_torch()


def test_the_variable_names_another_torch(tmp_path: Path, only_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_torch(tmp_path / "elsewhere", "2.14.1")
    monkeypatch.setenv(torch_pin.FOLDER_VARIABLE, str(folder))
    assert find_torch() == Torch(folder, "2.14.1")


def test_a_variable_that_names_no_torch_is_refused(only_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torch_pin.FOLDER_VARIABLE, str(only_in))
    with pytest.raises(SystemExit, match=torch_pin.FOLDER_VARIABLE):
        find_torch()


@pytest.mark.parametrize("version", ["2.8.1+cpu", "1.13.0"])
def test_a_torch_that_is_too_old_is_refused_in_one_sentence(only_in: Path, version: str) -> None:
    make_torch(only_in, version)
    with pytest.raises(SystemExit) as raised:
        backend.get_requires_for_build_wheel()
    assert f"needs torch 2.9 or newer, but torch {version} is installed in {only_in}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("version", ["2.9.0", "2.15.0a0+git1", "3.0.0"])
def test_every_newer_torch_is_accepted(only_in: Path, version: str) -> None:
    folder = make_torch(only_in, version)
    assert find_torch() == Torch(folder, version)


def test_windows_is_pointed_to_wsl2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="WSL2"):
        find_torch()


@pytest.mark.parametrize(
    ("version", "requirement"),
    [
        ("2.13.0+cpu", "torch>=2.13,<2.14"),
        ("2.14.1", "torch>=2.14,<2.15"),
        ("2.13.0a0+git1234", "torch>=2.13,<2.14"),
    ],
)
def test_the_requirement_is_the_minor_version_built_for(version: str, requirement: str) -> None:
    assert Torch(Path(), version).requirement == requirement


SETTINGS = {"version": "1.2.3", "dependencies": ["numpy"]}


def metadata_of(state: str) -> dict[str, object]:
    pin = TorchPin()
    pin.build_state(state)
    return pin.dynamic_metadata(SETTINGS, {})


def test_wheel_metadata_pins_torch_beside_the_other_dependencies(only_in: Path) -> None:
    make_torch(only_in)
    assert metadata_of("metadata_wheel") == {"version": "1.2.3", "dependencies": ["torch>=2.13,<2.14", "numpy"]}


def test_a_source_distribution_needs_no_torch_and_pins_none(only_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torch_pin.LABEL_VARIABLE, "1")
    assert metadata_of("sdist") == {"version": "1.2.3", "dependencies": ["torch", "numpy"]}


def test_a_wheel_for_a_release_is_labelled_with_its_torch(only_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_torch(only_in, "2.14.1+cpu")
    monkeypatch.setenv(torch_pin.LABEL_VARIABLE, "1")
    assert metadata_of("wheel")["version"] == "1.2.3+torch2.14"


def test_cmake_is_told_where_torch_is_unless_the_caller_says(only_in: Path) -> None:
    folder = make_torch(only_in)
    key = "cmake.define.ACCELERATE_TORCH_DIR"
    assert backend.with_torch(None) == {key: str(folder)}
    assert backend.with_torch({key: "x", "build-dir": "b"}) == {key: "x", "build-dir": "b"}
