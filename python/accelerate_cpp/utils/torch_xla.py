"""Installing torch_xla in Colab."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.version import Version

from accelerate_cpp.errors import InvalidArgument, SystemFailure

__all__ = ["install_xla"]


def install_xla(upgrade: bool = False) -> None:
    """Installs, in a notebook of Colab, the torch_xla that goes with the torch that is installed there.

    Args:
        upgrade: look for a newer release of that version also when there is one already.

    This has run only with a double of pip, in the tests, and never in Colab.

    Raises:
        InvalidArgument: this is no notebook of Colab.
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
        raise SystemFailure(f"install_xla: pip install {wanted} failed with exit status {status}; its output says why")
