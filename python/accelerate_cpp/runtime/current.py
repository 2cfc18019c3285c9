"""The one global of the package: what the drop-in state classes are views of. Only root files read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate_cpp.runtime.accumulation import Accumulation

if TYPE_CHECKING:
    from accelerate_cpp.runtime.session import Session

session: Session | None = None
accumulation: Accumulation = Accumulation()
