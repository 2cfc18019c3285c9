"""Finds the torch that accelerate_cpp is built against and names it in the wheel's metadata.

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
OLDEST_TORCH = "2.9"
LABEL_VARIABLE = "ACCELERATE_CPP_LABEL_WHEEL"

NO_TORCH = (
    "accelerate-cpp is built against an installed torch, and none was found for {python}: run "
    "`pip install torch` there first and then install accelerate-cpp again "
    f"(or name torch's folder in {FOLDER_VARIABLE})."
)
TOO_OLD = (
    "accelerate-cpp needs torch {oldest} or newer, but torch {version} is installed in {folder}: run "
    "`pip install --upgrade torch` first and then install accelerate-cpp again."
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
        major, minor = numbers_of(self.version)
        return f"torch>={major}.{minor},<{major}.{minor + 1}"


def numbers_of(version: str) -> tuple[int, ...]:
    """The major and minor number of ``version``."""
    return tuple(int(part) for part in version.split(".")[:2])


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
        SystemExit: with one sentence that says what to do when there is none, when it is too old, or when the system
            cannot build.
    """
    if sys.platform == "win32":
        raise SystemExit(NO_WINDOWS)
    named = os.environ.get(FOLDER_VARIABLE)
    folders = [Path(named)] if named else [folder / "torch" for folder in site_folders()]
    torch = next(filter(None, map(read_torch, folders)), None)
    if torch is None and named:
        raise SystemExit(
            f"{FOLDER_VARIABLE}={named}: expected torch's package folder, with version.py, include and lib."
        )
    if torch is None:
        raise SystemExit(NO_TORCH.format(python=sys.executable))
    if numbers_of(torch.version) < numbers_of(OLDEST_TORCH):
        raise SystemExit(TOO_OLD.format(oldest=OLDEST_TORCH, version=torch.version, folder=torch.folder.parent))
    return torch


class TorchPin:
    """scikit-build-core's dynamic-metadata provider: the version, and the dependencies with the torch built against.

    With ACCELERATE_CPP_LABEL_WHEEL=1, the version of a wheel says which torch it is for, such as ``0.1.0+torch2.13``,
    so that the wheels of one release for several versions of torch can be in one place, and be asked for.
    """

    def __init__(self) -> None:
        self._state = "metadata_wheel"

    def build_state(self, build_state: str) -> None:
        self._state = build_state

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        version, dependencies = settings["version"], settings["dependencies"]
        if self._state == "sdist":
            return {"version": version, "dependencies": ["torch", *dependencies]}
        torch = find_torch()
        if os.environ.get(LABEL_VARIABLE) == "1":
            version += "+torch{}.{}".format(*numbers_of(torch.version))
        return {"version": version, "dependencies": [torch.requirement, *dependencies]}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}
