"""Finding the libraries of trackers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from accelerate_cpp.errors import MissingLibrary
from accelerate_cpp.plugins.enums import LoggerType
from accelerate_cpp.trackers import libraries


def test_every_tracker_of_the_enum_has_its_library() -> None:
    assert {*libraries.MODULES, "all"} == set(LoggerType.list())


def test_a_library_is_installed_if_its_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_installed: Callable[..., None]
) -> None:
    not_installed("swanlab")
    assert not libraries.is_installed("swanlab")
    monkeypatch.delitem(sys.modules, "swanlab")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "swanlab").mkdir()
    (tmp_path / "swanlab" / "__init__.py").touch()
    assert libraries.is_installed("swanlab")


def test_a_folder_of_logs_with_the_name_of_a_library_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    (tmp_path / "swanlab").mkdir()
    assert not libraries.is_installed("swanlab")


def test_a_module_that_was_put_in_place_by_hand_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", ModuleType("swanlab"))
    assert libraries.is_installed("swanlab")
    assert libraries.load("swanlab") is sys.modules["swanlab"]


@pytest.mark.parametrize(
    ("missing", "found"), [((), "tensorboard"), (("tensorboard",), "tensorboardX"), (("tensorboardX",), "tensorboard")]
)
def test_the_second_module_serves_where_the_first_is_missing(
    double: Callable[..., object], not_installed: Callable[..., None], missing: tuple[str, ...], found: str
) -> None:
    double("tensorboard")
    double("tensorboardX")
    not_installed(*missing)
    assert libraries.is_installed("tensorboard")
    assert libraries.load("tensorboard").__name__ == found


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("comet_ml", "comet-ml")])
def test_a_missing_library_is_an_error_that_says_how_to_install_it(
    not_installed: Callable[..., None], name: str, package: str
) -> None:
    not_installed(name)
    with pytest.raises(MissingLibrary, match=rf"pip install {package}\)") as caught:
        libraries.load(name)
    assert libraries.how_to_install(name) in str(caught.value)


def test_a_submodule_is_imported(double: Callable[..., object]) -> None:
    double("mlflow")
    double("mlflow.utils")
    double("mlflow.utils.validation")
    assert libraries.load("mlflow", "utils.validation") is sys.modules["mlflow.utils.validation"]
