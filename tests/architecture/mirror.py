"""Every source file has its test twin, at the same place in the tree of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cxx
from tree import PACKAGE, Violation, cxx_files, python_files


def _has_code(root: Path, paths: list[Path]) -> bool:
    return any(next(cxx.functions((root / path).read_text()), None) is not None for path in paths)


def core_violations(root: Path) -> Iterator[Violation]:
    """csrc/core/x/y.{h,cpp} with code → tests/cpp/core/x/y_test.cpp."""
    units: dict[Path, list[Path]] = {}
    for path in cxx_files(root, "csrc/core"):
        units.setdefault(path.with_suffix(""), []).append(path)
    for unit, paths in units.items():
        twin = Path("tests/cpp") / unit.relative_to("csrc").parent / f"{unit.name}_test.cpp"
        if _has_code(root, paths) and not (root / twin).is_file():
            yield Violation(str(sorted(paths)[0]), 0, f"has no test {twin}")


def bridge_violations(root: Path) -> Iterator[Violation]:
    """csrc/torch_bridge/x.cpp → tests/cpp/torch_bridge/x_test.cpp or tests/python/torch_bridge/test_x.py."""
    for path in cxx_files(root, "csrc/torch_bridge"):
        twins = (
            Path(f"tests/cpp/torch_bridge/{path.stem}_test.cpp"),
            Path(f"tests/python/torch_bridge/test_{path.stem}.py"),
        )
        if path.suffix == ".cpp" and not any((root / twin).is_file() for twin in twins):
            yield Violation(str(path), 0, f"has neither {twins[0]} nor {twins[1]}")


def bindings_violations(root: Path) -> Iterator[Violation]:
    """csrc/bindings/bind_x.cpp → tests/python/bindings/test_x.py."""
    for path in cxx_files(root, "csrc/bindings"):
        twin = Path(f"tests/python/bindings/test_{path.stem.removeprefix('bind_')}.py")
        if path.suffix == ".cpp" and path.stem.startswith("bind_") and not (root / twin).is_file():
            yield Violation(str(path), 0, f"has no test {twin}")


def python_violations(root: Path) -> Iterator[Violation]:
    """python/accelerate_cpp/a/b.py → tests/python/a/test_b.py."""
    for path in python_files(root, PACKAGE):
        inside = path.relative_to(PACKAGE)
        twin = Path("tests/python") / inside.parent / f"test_{inside.stem.lstrip('_')}.py"
        if path.name not in {"__init__.py", "__main__.py"} and not (root / twin).is_file():
            yield Violation(str(path), 0, f"has no test {twin}")


def violations(root: Path) -> list[Violation]:
    """All files without a test twin."""
    return [
        *core_violations(root),
        *bridge_violations(root),
        *bindings_violations(root),
        *python_violations(root),
    ]
