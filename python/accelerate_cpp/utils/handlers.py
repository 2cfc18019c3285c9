"""The base of everything that ``Accelerator(kwargs_handlers=[...])`` takes."""

from __future__ import annotations

import copy
from typing import Any


class KwargsHandler:
    """Keyword arguments for something that ``Accelerator`` creates on the user's behalf."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        defaults = self._defaults()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def _defaults(self) -> dict[str, Any]:
        """What :meth:`to_dict` returns where nothing was chosen."""
        return type(self)().to_dict()
