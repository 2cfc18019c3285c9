"""What a library writes of its engines: whole processes are in tests/distributed/test_deepspeed.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint import engine_states
from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.files import FileRecord, record_of
from accelerate_cpp.checkpoint.manifest import Manifest
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.writing import Checkpoint
from threaded_ranks import outcomes, ranks_of


class Engines:
    """A strategy whose library writes a pickle of each rank, and two files of its own on the first."""

    def __init__(self, rank: int, failure: Exception | None = None) -> None:
        self.rank, self.failure = rank, failure

    def save_engines(
        self, _models: Sequence[Any], folder: Path, tags: Sequence[str], write: Callable[[Path, Any], object]
    ) -> Exception | None:
        (folder / tags[0]).mkdir(exist_ok=True)
        write(folder / tags[0] / f"rank_{self.rank}.pt", {"weights": torch.full((3,), float(self.rank))})
        for name in ("latest", "script.py") if self.rank == 0 else ():
            (folder / name).write_text(name)
        return self.failure


def states(rank: int, failure: Exception | None = None) -> EngineStates:
    return EngineStates(Engines(rank, failure), [None], {})  # type: ignore[arg-type]


def test_all_files_are_recorded_and_only_those_of_others_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def reading(path: Path) -> FileRecord:
        read.append(path.name)
        return record_of(path)

    monkeypatch.setattr(engine_states, "record_of", reading)
    records: dict[str, FileRecord] = {}
    for own in outcomes(ranks_of([0, 0]), lambda ranks: states(ranks.place).write(tmp_path, ranks)()):
        assert isinstance(own, dict)
        assert not records.keys() & own.keys()
        records |= own
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 4
    assert records == {path.relative_to(tmp_path).as_posix(): record_of(path) for path in written}
    assert sorted(read) == ["latest", "script.py"]


@pytest.mark.parametrize("disks", ["one", "two"])
def test_a_checkpoint_of_several_hosts_has_them_and_nothing_else(tmp_path: Path, disks: str) -> None:
    hosts = [0, 0, 1, 1]
    targets = [tmp_path / ("a" if disks == "one" or host == 0 else "b") / "c" for host in hosts]

    def save(ranks: Participants) -> None:
        manifest = Manifest(0, 4, {}, [])
        Checkpoint(targets[ranks.place], "token", [], manifest, engines=states(ranks.place)).write(ranks)

    assert outcomes(ranks_of(hosts), save) == [None] * 4
    first = ["accelerate_cpp.json", "latest", "script.py", "pytorch_model/rank_0.pt", "pytorch_model/rank_1.pt"]
    second = ["pytorch_model/rank_2.pt", "pytorch_model/rank_3.pt"]
    assert files_in(targets[0]) == sorted(first + second if disks == "one" else first)
    assert disks == "one" or files_in(targets[3]) == sorted(["accelerate_cpp.json", *second])


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_the_library_could_not_write_is_raised_when_all_have_come_together(tmp_path: Path) -> None:
    finish = states(0, TypeError("cannot pickle it")).write(tmp_path, Participants())
    with pytest.raises(TypeError, match="cannot pickle it"):
        finish()
