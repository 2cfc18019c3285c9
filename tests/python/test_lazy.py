"""Names that are loaded when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.lazy import lazy_names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with one module ``tools`` that has the name ``hammer``."""
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text("")
    (tmp_path / "lazy_package" / "tools.py").write_text("hammer = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "lazy_package"
    for name in [name for name in sys.modules if name.split(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_a_name_is_loaded_from_its_module_and_kept(package: str) -> None:
    namespace: dict[str, Any] = {}
    load, _ = lazy_names(package, namespace, {"hammer": "lazy_package.tools"}, ())
    assert "lazy_package.tools" not in sys.modules
    assert load("hammer") is sys.modules["lazy_package.tools"].hammer
    assert namespace["hammer"] is load("hammer")


def test_a_submodule_is_imported(package: str) -> None:
    load, _ = lazy_names(package, {}, {}, {"tools"})
    assert load("tools") is sys.modules["lazy_package.tools"]


def test_an_unknown_name_is_an_attribute_error_that_names_it(package: str) -> None:
    load, _ = lazy_names(package, {}, {}, ())
    with pytest.raises(AttributeError, match="'lazy_package' has no attribute 'saw'"):
        load("saw")


def test_all_names_are_listed(package: str) -> None:
    _, list_names = lazy_names(package, {"own": 1}, {"hammer": "lazy_package.tools"}, {"tools"})
    assert list_names() == ["hammer", "own", "tools"]
