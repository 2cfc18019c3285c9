"""Doubles of the libraries of trackers, and the place of a process that is not the main one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

Calls = list[tuple[Any, ...]]


class Recorder:
    """Has every attribute. Calls of it and assignments to it are kept, under its dotted name.

    A call gives what ``answers`` has under the name of the call, or another recorder.
    """

    def __init__(self, name: str, calls: Calls, answers: dict[str, Any]) -> None:
        self.__dict__.update(_name=name, _calls=calls, _answers=answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answers.get(f"{self._name}.{name}", Recorder(f"{self._name}.{name}", self._calls, self._answers))

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._name}.{name} =", value))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append((f"{self._name}[{key!r}] =", value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._name, *args, *([kwargs] if kwargs else [])))
        answer = f"{self._name}()"
        return self._answers.get(answer, Recorder(answer, self._calls, self._answers))

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class _DoubledModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dict__.get("absent", ()):
            raise AttributeError(name)
        answers = self.__dict__["answers"]
        return answers.get(f"{self.__name__}.{name}", Recorder(f"{self.__name__}.{name}", self.calls, answers))


Double = Callable[..., Calls]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """Call it with the name of a module, which is then a double, with ``answers`` and without what is ``absent``.

    It returns the list of what is called: name, positional arguments, and the keyword arguments if there are any.
    """

    def install(name: str, answers: dict[str, Any] | None = None, absent: tuple[str, ...] = ()) -> Calls:
        module = _DoubledModule(name)
        module.__spec__ = ModuleSpec(name, None, origin="a double")
        module.__dict__.update(calls=[], answers=answers or {}, absent=absent)
        monkeypatch.setitem(sys.modules, name, module)
        calls: Calls = module.calls
        return calls

    return install


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with the names of modules that then cannot be imported."""

    def remove(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return remove


@pytest.fixture
def on_main(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Call it with whether this process is to be the main one of two; at first it is the only one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def place(is_main: bool) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0" if is_main else "1")

    return place
