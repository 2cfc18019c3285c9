"""The stub of the C++ module says what the module has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import accelerate_cpp
from accelerate_cpp import _native


def stub_path() -> Path:
    """The stub next to the Python sources, wherever the module itself was built."""
    candidates = [Path(folder) / "_C.pyi" for folder in accelerate_cpp.__path__]
    candidates.append(Path(_native.__file__).parent / "_C.pyi")
    return next(path for path in candidates if path.exists())


def names_of(body: list[ast.stmt]) -> set[str]:
    """Functions, classes and annotated attributes that a stub declares, without special methods."""
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_stub_declares_the_names_of_the_module() -> None:
    from accelerate_cpp import _C

    declared = names_of(ast.parse(stub_path().read_text()).body)
    assert declared == {name for name in vars(_C) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["Communicator", "C10dBackend", "GradientReducer", "LossScale"])
def test_stub_declares_the_members_of_each_class(name: str) -> None:
    from accelerate_cpp import _C

    body = ast.parse(stub_path().read_text()).body
    [declaration] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    members = {member for member in vars(getattr(_C, name)) if not member.startswith("_")}
    assert names_of(declaration.body) == members
