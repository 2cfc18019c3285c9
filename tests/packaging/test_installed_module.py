"""The compiled module as it is installed: what it links, what it exports, and which torch it accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([name, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def module() -> Path:
    import torch  # noqa: F401  (the module needs its libraries)

    from accelerate_cpp import _C

    return Path(_C.__file__)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


@linux_only
def test_it_links_no_cuda_library(module: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", str(module)))
    assert any(name.startswith("libtorch") for name in needed)
    assert [name for name in needed if re.search(r"cuda|cudart|nvrtc|nccl", name)] == []


@linux_only
def test_it_finds_torch_beside_itself(module: Path) -> None:
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", tool("readelf", "-d", str(module))) == [
        "$ORIGIN/../torch/lib"
    ]


@linux_only
def test_its_own_symbols_are_hidden(module: Path) -> None:
    symbols = [line.split()[-1] for line in tool("nm", "-D", "-C", "--defined-only", str(module)).splitlines()]
    assert "PyInit__C" in symbols
    assert [name for name in symbols if name.startswith("accelerate_cpp")] == []


def test_it_says_which_torch_it_was_built_for() -> None:
    import torch

    from accelerate_cpp import _build_info

    assert _build_info.TORCH_VERSION.split("+")[0] == torch.__version__.split("+")[0]


def test_another_torch_than_it_was_built_for_is_one_clear_error(module: Path, tmp_path: Path) -> None:
    import accelerate_cpp

    package = tmp_path / "accelerate_cpp"
    shutil.copytree(Path(accelerate_cpp.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(module, package)
    (package / "_build_info.py").write_text('TORCH_VERSION = "2.12.1+cpu"\n')
    # -S leaves out the hooks of an editable install; the packages themselves are named by hand.
    script = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}; from accelerate_cpp import Accelerator"
    run = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode != 0
    assert last.startswith("accelerate_cpp.errors.BuildMismatch")
    assert "2.12" in last
    assert "2.13" in last
