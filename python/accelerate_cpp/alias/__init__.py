"""The alias: programs that say ``import accelerate`` get this package, with all that they expect of the original."""

from __future__ import annotations

from accelerate_cpp.lazy import lazy_names

# Every module that lends names imports this package; only a process that uses the alias loads the rest.
_MODULE_OF: dict[str, str] = dict.fromkeys(
    ("INTERFACE_VERSION", "install", "install_if_asked", "is_installed"), "accelerate_cpp.alias.finder"
)

__all__ = sorted(_MODULE_OF)

__getattr__, __dir__ = lazy_names(__name__, globals(), _MODULE_OF, ())
