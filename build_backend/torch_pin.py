"""Finds the torch that accelerate_cpp is built against and pins it in the wheel's metadata.

torch is never imported here: an isolated build cannot import it, and its folder and version file say enough.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ACCELERATE_TORCH_DIR"

NO_TORCH = (
    "accelerate-cpp is built against an installed torch, and none was found for {python}: run "
    "`pip install torch` there first and then install accelerate-cpp again "
    f"(or name torch's folder in {FOLDER_VARIABLE})."
)
NO_WINDOWS = "accelerate-cpp runs on Linux and macOS; on Windows install it inside WSL2 (Ubuntu or Debian)."


@dataclass(frozen=True)
class Torch:
    """An installed torch: its package folder and its version text, for example ``2.13.0+cpu``."""

    folder: Path
    version: str

    @property
    def requirement(self) -> str:
        """What a wheel built against it needs: torch's C++ interfaces are stable within one minor version only."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return f"torch>={major}.{minor},<{major}.{minor + 1}"


def site_folders() -> Iterator[Path]:
    """Where the interpreter that runs the build keeps its packages, also those that an isolated build hides from it."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent.parent
    for key in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(key))
    if _sees_system_packages():
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        for key in ("platlib", "purelib"):
            yield Path(sysconfig.get_path(key, vars=base))
    if sys.prefix == sys.base_prefix:
        yield Path(site.getusersitepackages())


def _sees_system_packages() -> bool:
    configuration = Path(sys.prefix, "pyvenv.cfg")
    return configuration.is_file() and bool(
        re.search(r"^include-system-site-packages\s*=\s*true\s*$", configuration.read_text(), re.MULTILINE)
    )


def read_torch(folder: Path) -> Torch | None:
    """The torch in package folder ``folder``, or ``None`` when there is none with headers and libraries."""
    version_file = folder / "version.py"
    if not (version_file.is_file() and (folder / "include").is_dir() and (folder / "lib").is_dir()):
        return None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.MULTILINE)
    return Torch(folder.resolve(), version.group(1)) if version else None


def find_torch() -> Torch:
    """The torch of the environment that is being installed into.

    Raises:
        SystemExit: with one sentence that says what to do when there is none, or when the system cannot build.
    """
    if sys.platform == "win32":
        raise SystemExit(NO_WINDOWS)
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        torch = read_torch(Path(named))
        if torch is None:
            raise SystemExit(
                f"{FOLDER_VARIABLE}={named}: expected torch's package folder, with version.py, include and lib."
            )
        return torch
    for folder in site_folders():
        torch = read_torch(folder / "torch")
        if torch is not None:
            return torch
    raise SystemExit(NO_TORCH.format(python=sys.executable))


class TorchPin:
    """scikit-build-core's dynamic-metadata provider: the project's dependencies and the torch built against."""

    def __init__(self) -> None:
        self._state = "metadata_wheel"

    def build_state(self, build_state: str) -> None:
        self._state = build_state

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
        torch = "torch" if self._state == "sdist" else find_torch().requirement
        return {"dependencies": [torch, *settings["dependencies"]]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}
