"""The moments at which processes of an endless run are measured: they stand still until they have been.

A process tells of such a moment with a file, :func:`stand_still`; whoever measures answers with another, :func:`go_on`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.005


def _notice(folder: Path, name: str, moment: int) -> Path:
    return folder / f"{name}.{moment}.quiet"


def _answer(folder: Path, name: str, moment: int) -> Path:
    return folder / f"{name}.{moment}.go"


def stand_still(folder: Path, name: str, moment: int, **facts: Any) -> bool:
    """Returns when the process has been measured: whether it is to go on. ``facts`` are told to who measures."""
    notice, answer = _notice(folder, name, moment), _answer(folder, name, moment)
    part = notice.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), **facts}))
    part.rename(notice)
    while not answer.exists():
        time.sleep(POLL_SECONDS)
    goes_on = answer.read_text() == "on"
    answer.unlink()
    return goes_on


def standing(folder: Path, name: str, moment: int) -> dict[str, Any] | None:
    """What a process has told with its notice; ``None`` while it has not come so far."""
    notice = _notice(folder, name, moment)
    told: dict[str, Any] | None = json.loads(notice.read_text()) if notice.exists() else None
    return told


def go_on(folder: Path, name: str, moment: int, more: bool) -> None:
    """Lets a process go on, or end."""
    _notice(folder, name, moment).unlink()
    answer = _answer(folder, name, moment)
    part = answer.with_suffix(".answered")
    part.write_text("on" if more else "end")
    part.rename(answer)
