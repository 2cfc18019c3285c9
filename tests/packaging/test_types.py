"""Type checkers and editors know the names that are loaded lazily."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import stubs


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stub_of_a_lazy_package_is_the_one_of_its_names(package: str) -> None:
    assert stubs.stub_file(package).read_text() == stubs.stub_of(package), "run `make docs`"


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stub_has_every_public_name_and_submodule(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(stubs.stub_of(package))
    names = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == {*module.__all__, *module._SUBMODULES}


def test_package_says_that_it_has_types() -> None:
    assert stubs.SOURCES.joinpath("accelerate_cpp", "py.typed").is_file()


def test_stubs_are_written_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "SOURCES", tmp_path)
    for package in stubs.PACKAGES:
        stubs.stub_file(package).parent.mkdir(parents=True, exist_ok=True)
    stubs.main()
    for package in stubs.PACKAGES:
        assert stubs.stub_file(package).read_text() == stubs.stub_of(package)
