"""Files in memory without a name, which processes inherit."""

from __future__ import annotations

import os

__all__ = ["memory_file"]


def memory_file(name: str) -> int:
    """The descriptor of a new, empty one that only its owner may open; ``name`` is shown in ``/proc``.

    The system itself would let everybody open it who can reach a process that has it.
    """
    descriptor = os.memfd_create(name)
    os.fchmod(descriptor, 0o600)
    return descriptor
