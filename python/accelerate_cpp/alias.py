"""The alias: programs that say ``import accelerate`` get this package.

It answers imports of ``accelerate`` and everything in it before any other finder does, whether the original is
installed or not. Modules are the same objects under both names; only the package itself is another one, because
programs ask it for the version of the interface. ``accelerate_cpp_alias.pth`` installs the alias at the start of every
Python whose environment has ACCELERATE_CPP_ALIAS, so that it reaches processes which others start.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from accelerate_cpp import loggers
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import AccelerateError

INTERFACE_VERSION = "1.15.0"
"""The version of the original whose interface this is."""
_ALIAS, _OWN = "accelerate", "accelerate_cpp"
_TEXTS = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_ALIAS}\nVersion: {INTERFACE_VERSION}\n",
    "top_level.txt": f"{_ALIAS}\n",
}


def install() -> None:
    """Installs the alias in this process, and for those that it starts. Doing so again changes nothing.

    Raises:
        AccelerateError: the original has been imported before.
    """
    if is_installed():
        return
    imported = sys.modules.get(_ALIAS)
    if imported is not None:
        raise AccelerateError(
            f"the original accelerate has already been imported, from {getattr(imported, '__file__', 'nowhere')}: what "
            "has it keeps it. Put `import accelerate_cpp.compat` before the first import of accelerate and of what "
            "imports it (transformers, peft, trl), or start with `accelerate-cpp launch --alias`"
        )
    sys.meta_path.insert(0, _Finder())
    loggers.answer_to_original()
    env_table.export({env_table.ALIAS: True})


def install_if_asked() -> None:
    """Installs the alias if the environment asks for it."""
    if env_table.ALIAS.get():
        install()


def is_installed() -> bool:
    """Whether imports of ``accelerate`` in this process get this package."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(MetaPathFinder, InspectLoader):
    """Finds and loads modules under the alias, and knows a distribution of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _ALIAS:
            return None
        own = importlib.util.find_spec(_own_name(fullname))
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        spec = ModuleSpec(fullname, self, origin=own.origin, is_package=is_package)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        own = importlib.import_module(_own_name(name))
        if name == _ALIAS:
            vars(module).update(_root(own))
        else:
            sys.modules[name] = own  # which the import takes in the place of the new one

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``."""
        code: CodeType | None = _loader(_own_name(fullname)).get_code(_own_name(fullname))
        return code

    def get_source(self, fullname: str) -> str | None:
        """For tracebacks and the like."""
        source: str | None = _loader(_own_name(fullname)).get_source(_own_name(fullname))
        return source

    def is_package(self, fullname: str) -> bool:
        """Whether the module contains others."""
        return bool(_loader(_own_name(fullname)).is_package(_own_name(fullname)))

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The distribution ``accelerate``, by whose version programs tell what they can use."""
        name = None if context is None else context.name
        return [_Distribution()] if name in (None, _ALIAS) else []


class _Distribution(importlib.metadata.Distribution):
    """What programs find that look for an installed ``accelerate``."""

    def read_text(self, filename: str) -> str | None:
        return _TEXTS.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).parent.parent / path


def _own_name(fullname: str) -> str:
    return _OWN + fullname.removeprefix(_ALIAS)


def _loader(own_name: str) -> Any:
    spec = importlib.util.find_spec(own_name)
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ImportError(f"there is no source of {own_name}", name=own_name)
    return spec.loader


def _root(own: ModuleType) -> dict[str, Any]:
    """What the package has under the alias: what ours has, but another version."""
    return {
        "__doc__": own.__doc__,
        "__file__": own.__file__,
        "__version__": INTERFACE_VERSION,
        "__all__": own.__all__,
        "__getattr__": lambda name: getattr(own, name),
        "__dir__": lambda: dir(own),
    }
