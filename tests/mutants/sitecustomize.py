"""Lets a Python and those that it starts import one module of the package as the mutant that the environment names."""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder

_MODULE, _SOURCE = os.environ.get("MUTANT_MODULE", ""), os.environ.get("MUTANT_SOURCE", "")


class _Mutated(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        self._origin = spec.origin
        return importlib.util.spec_from_loader(fullname, self, origin=spec.origin)

    def exec_module(self, module):
        module.__file__ = self._origin
        with open(_SOURCE) as file:
            exec(compile(file.read(), self._origin, "exec"), module.__dict__)


if _MODULE:
    sys.meta_path.insert(0, _Mutated())
