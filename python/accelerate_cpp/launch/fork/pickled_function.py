"""Sends a function to another program, whose forks run it, with everything that it needs from the notebook."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork.captured_variables import variables_reached
from accelerate_cpp.launch.fork.pickle_files import Pickler, read
from accelerate_cpp.launch.fork.results import is_in_main


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of code in this process: environment variables, import paths, and random generators."""

    environment: Mapping[str, str]
    folder: str
    search_path: Sequence[str]
    arguments: Sequence[str]
    generators: Mapping[str, Any]

    @classmethod
    def here(cls) -> Surroundings:
        """The surroundings of code in this process, as they are now."""
        generators = {name: save() for name, (save, _) in _generators().items()}
        return cls(dict(os.environ), os.getcwd(), tuple(sys.path), tuple(sys.argv), generators)

    def enter(self) -> None:
        """Makes them those of this process, apart from the environment."""
        os.chdir(self.folder)
        sys.path[:] = self.search_path
        sys.argv[:] = self.arguments
        importlib.invalidate_caches()
        for name, state in self.generators.items():
            importlib.import_module(name)
            restore = _generators()[name][1]
            restore(state)


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Functions that get and set the global random states of loaded libraries, which a fork would inherit.

    Python's own is not among them: it is seeded again in every fork.
    """
    generators: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        generators["numpy.random"] = (numpy_random.get_state, numpy_random.set_state)
    if torch is not None:
        generators["torch"] = (torch.get_rng_state, torch.set_rng_state)
    return generators


@dataclass
class _Definitions:
    """The objects of ``__main__`` that a shipped function uses, by name, and the lines of cells, by their file name."""

    of_main: dict[str, object] = field(default_factory=dict)
    lines: dict[str, Sequence[str]] = field(default_factory=dict)


class _OnAccelerator(TypeError):
    """A tensor on a device cannot be shipped: a worker has another device, which the function has to choose."""


class TaskPickler(Pickler):
    """Ships what is defined in ``__main__`` itself, not its name. Writes the value and a ``_Definitions``.

    The latter fills while the former is written, and what it holds has been written by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._definitions = _Definitions()

    def dump(self, value: Any) -> None:
        super().dump((value, self._definitions))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            self._keep_lines(value.co_filename)
        elif is_in_main(value) and "." not in value.__qualname__:
            self._definitions.of_main[value.__qualname__] = value
        return super().reducer_override(value)

    def on_host(self, storage: Any) -> Any:
        if storage.device.type != "cpu":
            raise _OnAccelerator(f"a tensor on {storage.device}")
        return storage

    def _keep_lines(self, filename: str) -> None:
        entry = linecache.cache.get(filename)
        if entry is not None and len(entry) > 1 and entry[1] is None:  # no file that the worker could read
            self._definitions.lines[filename] = entry[2]


class ShippedTask:
    """A task in a file, which the worker that runs it takes out. Its surroundings are entered first."""

    def __init__(self, file: int, surroundings: Surroundings) -> None:
        self._file = file
        self._surroundings = surroundings

    def __call__(self) -> object:
        self._surroundings.enter()
        task, definitions = read(self._file)
        main = ModuleType("__main__")
        main.__dict__.update(definitions.of_main)
        sys.modules["__main__"] = main
        for filename, lines in definitions.lines.items():
            linecache.cache[filename] = (sum(map(len, lines)), None, list(lines), filename)
        return task()


def refusal(function: Callable[..., Any], args: Sequence[Any], error: Exception) -> InvalidArgument:
    """The error that names which variable of ``function``, or which of ``args``, cannot be shipped (``error``)."""
    subject = "it"
    # What a function uses comes after that function, so the last that fails is the cause of the others.
    for name, value in (*variables_reached(function), *((f"args[{index}]", value) for index, value in enumerate(args))):
        try:
            TaskPickler().dump(value)
        except Exception as cause:
            subject, error = f"`{name}`, which it uses,", cause
    called = getattr(function, "__name__", repr(function))
    if isinstance(error, _OnAccelerator):
        reason = f"is or holds {error}: move it to the CPU before the launch, or create it inside the function"
    else:
        reason = f"cannot be pickled ({type(error).__name__}: {error}): create it inside the function"
    return InvalidArgument(f"{called} has to be copied to a helper process, and {subject} {reason}")
