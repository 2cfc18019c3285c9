"""Installs the package of a vendor's device where a program of the tests finds it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIBRARIES = ROOT / "build" / "editable" / "tests" / "cpp"

_METADATA = "Metadata-Version: 2.1\nName: standin-device\nVersion: 1.0\n"
_ENTRY_POINTS = """
[torch.backends]
standin = standin_device:load

[accelerate_cpp.devices]
standin = standin_device:DEVICE
"""


def install(folder: Path) -> dict[str, str]:
    """Puts the package into ``folder``, and returns the environment of programs that use it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "standin_device").symlink_to(ROOT / "tests" / "vendor" / "standin_device")
    info = folder / "standin_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "STANDIN_DEVICE_LIBRARIES": str(LIBRARIES)}
