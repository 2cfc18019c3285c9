"""What tests of launches share."""

from __future__ import annotations

import os
from pathlib import Path

# Unbuffered, a print is several writes, and those of two workers mix.
LINES_STAY_WHOLE = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}


def lives(pid: int) -> bool:
    """Whether process ``pid`` has not ended; one that nobody has reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"
