from __future__ import annotations

import subprocess
import sys

CODE = """
import accelerate_cpp.compat
from accelerate import Accelerator
print(Accelerator.__module__)
"""


def test_importing_it_is_all_that_a_script_needs() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout == "accelerate_cpp.accelerator\n"
