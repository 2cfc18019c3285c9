"""The alias: programs that say ``import accelerate`` get this package.

It handles imports of ``accelerate`` and its modules before any other finder, whether the original is installed or not.
Modules are the same objects under both names; only the package object differs, because programs ask it for the version
of the interface. ``accelerate_cpp_start.pth`` installs the alias in every Python that starts with ACCELERATE_CPP_ALIAS
in its environment, so it also reaches processes that other programs start.

Programs that ask for the distribution of that name get the one in the folder ``distribution``, which joins
``sys.path``: that is where ``pkg_resources`` looks, and any other tool that knows nothing of finders. Its metadata are
in an ``egg-info``, since a wheel has to have no second ``dist-info``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from accelerate_cpp.alias import loggers
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import AccelerateError

INTERFACE_VERSION = "1.15.0"
"""The version of the original whose interface this is."""
_ALIAS, _OWN = "accelerate", "accelerate_cpp"
_DISTRIBUTIONS = Path(__file__).with_name("distribution")


def install() -> None:
    """Installs the alias in this process and in the processes that it starts. Calling it again has no effect.

    Raises:
        AccelerateError: the original has been imported before.
    """
    # The first place is the program's own folder, which programs take from there.
    _install(place=1)


def install_if_asked() -> None:
    """Installs the alias if the environment asks for it; meant for the start of Python."""
    if env_table.ALIAS.get():
        # The program's own folder is going to be put before it.
        _install(place=0)


def _install(place: int) -> None:
    """:func:`install`, with ``place`` the one in ``sys.path`` for the distribution."""
    if is_installed():
        return
    imported = sys.modules.get(_ALIAS)
    if imported is not None:
        raise AccelerateError(
            f"the original accelerate has already been imported, from {getattr(imported, '__file__', 'nowhere')}, and "
            "modules that imported it keep it. Put `import accelerate_cpp.compat` before the first import of "
            "accelerate and of libraries that import it (transformers, peft, trl), or start with `accelerate-cpp "
            "launch --alias`"
        )
    sys.meta_path.insert(0, _Finder())
    loggers.answer_to_original()
    sys.path.insert(place, str(_DISTRIBUTIONS))
    if "pkg_resources" in sys.modules:
        _show_to(sys.modules["pkg_resources"])
    env_table.export({env_table.ALIAS: True})


def _show_to(pkg_resources: Any) -> None:
    """Lets ``pkg_resources``, which looks at ``sys.path`` when it is imported, know the distribution."""
    for distribution in pkg_resources.find_distributions(str(_DISTRIBUTIONS)):
        pkg_resources.working_set.add(distribution, replace=True)


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
        """The distribution ``accelerate``, by whose version programs tell what they can use.

        It is also found through ``sys.path``; here it comes first, and does so where a program has made a ``sys.path``
        of its own.
        """
        context = context or importlib.metadata.DistributionFinder.Context()
        if context.path is not sys.path or (context.name is None and str(_DISTRIBUTIONS) in sys.path):
            return []
        if context.name is not None and context.name.lower() != _ALIAS:
            return []
        return [importlib.metadata.Distribution.at(_DISTRIBUTIONS / f"{_ALIAS}-{INTERFACE_VERSION}.egg-info")]


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
