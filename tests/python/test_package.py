"""The package as users import it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import accelerate_cpp
import accelerate_cpp.utils

PACKAGES = [accelerate_cpp, accelerate_cpp.utils]
HEAVY = {"torch", "numpy", "accelerate_cpp._C"}


@pytest.mark.parametrize("module", ["accelerate_cpp", "accelerate_cpp.utils", "accelerate_cpp.commands"])
def test_importing_it_loads_neither_torch_nor_the_core(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert module in loaded
    assert HEAVY.isdisjoint(loaded)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_listed_name_can_be_used(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is getattr(package, name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_lists_names_before_they_are_used(package: object) -> None:
    script = f"import {package.__name__} as p; print(*dir(p))"  # type: ignore[attr-defined]
    listed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert set(package.__all__) <= set(listed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # type: ignore[attr-defined] # noqa: B018


def test_submodules_are_attributes_without_being_imported() -> None:
    script = "import accelerate_cpp as a; print(a.utils.set_seed.__name__, a.state.PartialState.__name__)"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["set_seed", "PartialState"]


def test_a_name_is_the_same_object_wherever_it_is_imported_from() -> None:
    state = importlib.import_module("accelerate_cpp.state")
    dataclasses = importlib.import_module("accelerate_cpp.utils.dataclasses")
    assert accelerate_cpp.PartialState is state.PartialState
    assert accelerate_cpp.DistributedType is accelerate_cpp.utils.DistributedType is dataclasses.DistributedType


def test_the_version_is_the_one_of_the_distribution() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{accelerate_cpp.__version__}"' in project.read_text().splitlines()
