"""Findings, and the files in which each rank of a check writes down what it saw, line by line as it happens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        level: one of :data:`LEVELS`.
        code: a name for the kind of finding.
        what: a sentence or two on what was seen.
        where: ``file:line``, or empty.
        advice: what to do about it.
        ranks: the ranks on which it was seen.
    """

    level: str
    code: str
    what: str
    where: str = ""
    advice: str = ""
    ranks: tuple[int, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """The finding for JSON."""
        return asdict(self) | {"ranks": list(self.ranks)}


Record = dict[str, Any]


class Journal:
    """The file of one rank in ``folder``. A record is on its way as soon as it is written, however the process ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = open(folder / f"rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 - as long as the process

    def write(self, kind: str, **data: Any) -> None:
        """Adds a record of a ``kind``."""
        self._file.write(json.dumps({"kind": kind, **data}, default=str) + "\n")


def read_journals(folder: Path) -> dict[int, list[Record]]:
    """The records of each rank that wrote any; unfinished lines are ignored."""
    journals: dict[int, list[Record]] = {}
    for path in folder.glob("rank-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        journals[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in lines]
    return dict(sorted(journals.items()))


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The entries of ``records`` that are of ``kind``."""
    return [record for record in records if record["kind"] == kind]
