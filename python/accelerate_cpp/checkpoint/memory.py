"""Memory from the system for the states of checkpoints."""

from __future__ import annotations

import mmap
from contextlib import suppress

_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


def fresh_memory(size: int) -> mmap.mmap:
    """``size`` bytes of zeros, at least 1, in large pages where the system has them: ordinary ones take longer to get
    than to fill.
    """
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGEPAGE is not None:
        with suppress(OSError):  # kernels can be built without them
            block.madvise(_HUGEPAGE)
    return block
