"""write_basic_config for scripts; what it writes is tested with the command."""

from __future__ import annotations

import subprocess
import sys

from accelerate_cpp import utils
from accelerate_cpp.commands.config import write_basic_config


def test_it_is_that_of_the_command() -> None:
    assert utils.write_basic_config is write_basic_config


def test_training_does_not_load_the_command_line() -> None:
    script = "import sys, accelerate_cpp; accelerate_cpp.Accelerator; print('accelerate_cpp.commands' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
