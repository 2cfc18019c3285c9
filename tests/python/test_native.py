"""The door to the C++ module: it opens for the torch that this was built for, and says what to do otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from accelerate_cpp import _native


def import_with(build_info: str, what: str) -> str:
    """The errors of an import, where the module of build facts is replaced; and that the C++ module was not touched."""
    script = f"""
import atexit, sys, types
sys.modules["accelerate_cpp._build_info"] = {build_info}
atexit.register(lambda: print("accelerate_cpp._C" in sys.modules))
{what}
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "False\n")
    return done.stderr


IMPORTS = ["import accelerate_cpp._native", "from accelerate_cpp import Accelerator"]


@pytest.mark.parametrize("what", IMPORTS)
def test_a_module_built_for_another_torch_is_not_loaded(what: str) -> None:
    said = import_with("types.SimpleNamespace(TORCH_VERSION='2.12.0')", what)
    assert said.count("Traceback") == 1
    *frames, last = said.splitlines()
    assert len(frames) < 8
    assert last.startswith("accelerate_cpp.errors.BuildMismatch: accelerate_cpp was built for torch 2.12.0")
    assert f"torch {torch.__version__} is installed: run `accelerate-cpp rebuild`" in last


def test_a_package_that_was_not_built_says_how_to_install_it() -> None:
    said = import_with("None", IMPORTS[0])
    assert said.count("Traceback") == 1
    assert "was not built" in said
    assert "pip install" in said


def test_every_name_of_the_door_comes_from_the_module() -> None:
    from accelerate_cpp import _C

    for name in _native.__all__:
        assert getattr(_native, name) is getattr(_C, name)
