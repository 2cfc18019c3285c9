"""The task of the workers of a check, which their parent writes into a file for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FILE = "task.json"


@dataclass(frozen=True)
class Task:
    """One check.

    Attributes:
        script: path of the script, or with ``module`` the name of the module.
        arguments: of the script.
        steps: optimizer steps in each pass over a loader.
        time_limit_seconds: the time after which a worker ends itself.
        wait_seconds: how long ranks wait for each other.
        processes: the number of processes that run.
        configured: the number of processes in the configuration, or in a flag.
        settings: each setting of the launch as ``[value, source]``.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    steps: int = 2
    time_limit_seconds: float = 600.0
    wait_seconds: float = 60.0
    processes: int = 1
    configured: int = 1
    settings: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the task into ``folder``."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Task:
        """The task in ``folder``."""
        data = json.loads((folder / _FILE).read_text())
        data["arguments"] = tuple(data["arguments"])
        data["settings"] = {name: tuple(setting) for name, setting in data["settings"].items()}
        return Task(**data)
