"""What tests of launches share."""

from __future__ import annotations

from pathlib import Path


def lives(pid: int) -> bool:
    """Whether process ``pid`` has not ended; one that nobody has reaped yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"
