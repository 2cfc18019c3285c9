"""Whether the C++ module of this installation fits the torch that is installed, found out without importing either.

torch's C++ interface changes with each minor version, so the module works with the one that it was built for.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from accelerate_cpp.errors import BuildMismatch

OLDEST_TORCH = "2.9"  # the first one that the sources compile with


def built_for() -> str | None:
    """The version of torch that the C++ module was built for, such as ``2.13.0``; ``None`` if it was not built."""
    try:
        from accelerate_cpp._build_info import TORCH_VERSION
    except ImportError:
        return None
    return None if find_spec("accelerate_cpp._C") is None else str(TORCH_VERSION)


def installed_torch() -> str | None:
    """The version of torch that an import would find, such as ``2.13.0+cpu``; ``None`` if it would find none."""
    folder = torch_folder()
    if folder is None:
        return None
    for line in (folder / "version.py").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.rstrip() == "__version__":
            return value.strip(" '\"")
    return None


def torch_folder() -> Path | None:
    """The folder of the torch that an import would find, or ``None``."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder if folder is not None and (folder / "version.py").is_file() else None


def minor_of(version: str) -> str:
    """The major and minor number of ``version``: ``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def is_too_old(torch: str) -> bool:
    """Whether the sources do not compile with a torch of this version."""
    return _numbers(torch) < _numbers(OLDEST_TORCH)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in minor_of(version).split(".")]


def obstacle(built: str | None, torch: str | None) -> str | None:
    """Why a module built for torch ``built`` does not work with ``torch``, and what to do; ``None`` if it works."""
    if built is None:
        return (
            "accelerate_cpp was not built: its C++ module is missing. Install it with `pip install accelerate-cpp`, or "
            "with `pip install -e .` in a clone"
        )
    matching = f'`pip install "torch=={minor_of(built)}.*"`'
    if torch is None:
        return f"accelerate_cpp was built for torch {built}, but {sys.executable} finds no torch: run {matching}"
    if is_too_old(torch):
        return f"accelerate_cpp needs torch {OLDEST_TORCH} or newer, but torch {torch} is installed: run {matching}"
    if minor_of(built) != minor_of(torch):
        return (
            f"accelerate_cpp was built for torch {built}, but torch {torch} is installed: run `accelerate-cpp rebuild` "
            f"(takes some minutes) or {matching}"
        )
    return None


def require_fitting_torch() -> None:
    """Raises :class:`BuildMismatch`, with the command that helps, unless the C++ module fits the torch installed."""
    sentence = obstacle(built_for(), installed_torch())
    if sentence is not None:
        raise BuildMismatch(sentence)
