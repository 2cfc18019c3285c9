"""The command line starts quickly: its package loads neither torch nor the C++ core."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["accelerate_cpp", "accelerate_cpp.commands", "accelerate_cpp.commands.launch"])
def test_importing_it_loads_neither_torch_nor_the_core(module: str) -> None:
    script = f"import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    )
    assert module in loaded
    assert [name for name in loaded if name.split(".")[0] in {"torch", "numpy"} or name == "accelerate_cpp._C"] == []


def test_the_facade_does_not_load_torchs_compiler() -> None:
    script = "import sys, accelerate_cpp; accelerate_cpp.Accelerator; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_the_facade_loads_beyond_torch_two_small_libraries_and_itself() -> None:
    script = "import json, sys, torch; before = set(sys.modules); import accelerate_cpp; accelerate_cpp.Accelerator; "
    script += "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
    script += "print(json.dumps(sorted(names - set(sys.stdlib_module_names))))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == ["accelerate_cpp", "safetensors", "xxhash"]
