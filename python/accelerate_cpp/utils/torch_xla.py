"""Installing torch_xla in Colab."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.version import Version

from accelerate_cpp.errors import InvalidArgument, SystemFailure

__all__ = ["install_xla"]


def install_xla(upgrade: bool = False) -> None:
    """Installs, in a Colab notebook, the torch_xla that matches the installed torch.

    Args:
        upgrade: look for a newer release of that version even if one is installed.

    It has only been run in the tests, with a replacement for pip, and never in Colab.

    Raises:
        InvalidArgument: this is not a Colab notebook.
        SystemFailure: pip fails.
    """
    if "google.colab" not in sys.modules:
        raise InvalidArgument(
            "install_xla: expected a notebook of Google Colab; elsewhere run pip install 'torch_xla[tpu]' with the "
            "version of your torch"
        )
    torch = Version(importlib.metadata.version("torch"))
    wanted = f"torch_xla[tpu]=={torch.major}.{torch.minor}.*"
    options = ["--upgrade"] if upgrade else []
    status = subprocess.run([sys.executable, "-m", "pip", "install", *options, wanted], check=False).returncode
    if status != 0:
        raise SystemFailure(f"install_xla: pip install {wanted} failed with exit status {status}; see its output")
