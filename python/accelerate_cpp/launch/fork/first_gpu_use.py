"""Remembers which call of this process first used a GPU, so that an error can name it. Until then it has no cost."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any

from accelerate_cpp.launch.view.notebook_cells import place

_MODULES = ("torch.cuda", "torch.xpu")
_calls: dict[str, list[tuple[CodeType, int]]] = {}
"""By module: the place of the call, and the line of ``__main__`` that led there, if that is another place."""


def watch() -> None:
    """Makes torch report when it initialises CUDA (or ROCm) or XPU, also if torch is only imported later."""
    for name in _MODULES:
        if name in sys.modules:
            _watch(sys.modules[name])
        elif not any(isinstance(finder, _Later) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Later(name))


def first_use(kind: str) -> str | None:
    """The call that initialised ``kind`` (``"CUDA"``, ``"ROCm"`` or ``"XPU"``); ``None`` if it was not watched."""
    calls = _calls.get("torch.xpu" if kind == "XPU" else "torch.cuda")
    if not calls:
        return None
    return ", called from ".join(
        f"`{linecache.getline(code.co_filename, line).strip()}` ({place(code.co_filename, line)})"
        for code, line in calls
    )


def _watch(module: Any) -> None:
    if hasattr(module, "_lazy_call") and not module.is_initialized():
        module._lazy_call(lambda: _remember(module.__name__))


def _remember(module: str) -> None:
    """Runs inside torch's initialisation: notes the innermost call from outside of torch, and that of ``__main__``."""
    calls: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "__main__" or (not calls and name.partition(".")[0] != "torch" and name != __name__):
            calls.append((frame.f_code, frame.f_lineno))
        if name == "__main__":
            break
        frame = frame.f_back
    _calls[module] = calls


class _Later:
    """A finder that finds nothing itself, but makes one module watched as soon as it has been imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec
