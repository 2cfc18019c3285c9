"""``import accelerate_cpp.compat``: from then on, this program and those it starts import us as ``accelerate``."""

from __future__ import annotations

from accelerate_cpp.alias import install

install()
