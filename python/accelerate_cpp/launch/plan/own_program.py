"""How a module of a package is run as a program of its own, where nobody else's module can take its place."""

from __future__ import annotations

import sys

__all__ = ["WITHOUT_CURRENT_FOLDER", "module_program"]

WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
"""How a program for ``python -c`` begins, which would import from the current folder first, as ``-m`` does: others may
be able to write there. ``-P`` does the same from Python 3.11 on."""

_RUN = f"{WITHOUT_CURRENT_FOLDER}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_program(module: str) -> tuple[str, ...]:
    """The command that runs ``module`` as ``python -m`` does, but for the current folder; arguments follow it."""
    return sys.executable, "-c", _RUN, module
