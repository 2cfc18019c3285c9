"""The door to the C++ module: it opens for the torch it was built for, and says what to do otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from accelerate_cpp import _native
from accelerate_cpp._native import check_torch_version


@pytest.mark.parametrize("installed", ["2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.0a0+git123"])
def test_the_same_minor_version_fits(installed: str) -> None:
    check_torch_version("2.13.0", installed)


@pytest.mark.parametrize("installed", ["2.12.1", "2.14.0+cpu", "3.13.0", "2.1.0", "2.130.0"])
def test_another_minor_version_is_refused_with_both_remedies(installed: str) -> None:
    with pytest.raises(ImportError, match=r"built for torch 2\.13\.0, but torch .* is installed") as caught:
        check_torch_version("2.13.0", installed)
    assert installed in str(caught.value)
    assert "install torch 2.13, or reinstall accelerate-cpp" in str(caught.value)


def test_this_build_fits_this_torch() -> None:
    check_torch_version(_native.TORCH_VERSION, torch.__version__)


def import_with(build_info: str) -> str:
    """What an import says when the module of build facts is replaced; and that the C++ module was not touched."""
    script = f"""
import sys, types
sys.modules["accelerate_cpp._build_info"] = {build_info}
try:
    import accelerate_cpp._native
except ImportError as error:
    assert "accelerate_cpp._C" not in sys.modules
    print(error)
"""
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


def test_a_module_built_for_another_torch_is_not_loaded() -> None:
    said = import_with("types.SimpleNamespace(TORCH_VERSION='1.0.0')")
    assert f"built for torch 1.0.0, but torch {torch.__version__} is installed" in said


def test_a_package_that_was_not_built_says_how_to_install_it() -> None:
    said = import_with("None")
    assert "was not built" in said
    assert "pip install" in said


def test_every_name_of_the_door_comes_from_the_module() -> None:
    from accelerate_cpp import _C

    for name in set(_native.__all__) - {"check_torch_version"}:
        assert getattr(_native, name) is getattr(_C, name)
