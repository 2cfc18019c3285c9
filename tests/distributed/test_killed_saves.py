"""No kill inside a save loses a checkpoint in shards, in stages or of engines, whoever is killed and wherever.

``ACCELERATE_CPP_TEST_KILLS`` is the number of kills for each layout and mode, and ``ACCELERATE_CPP_TEST_SEED`` another
seed. What was drawn, and what became of it, is printed; a test that fails names its draw, which ``Draw(...)`` repeats.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from killed_saves import ENGINES, SHARDED, VICTIMS, Draw, goes_on_until_it_is_killed, loads, phases_of
from launched import STARTED, lives
from processes import run_processes, running
from rank_process import await_end

pytest.importorskip("torch")

KILLS = int(os.environ.get("ACCELERATE_CPP_TEST_KILLS", "2"))
SEED = os.environ.get("ACCELERATE_CPP_TEST_SEED", "1")
PATIENCE_SECONDS = 300.0
CELLS = [(layout, blocking) for layout in SHARDED for blocking in (True, False)] + [(one, True) for one in ENGINES]
# The layouts and numbers of processes that also read a checkpoint; DeepSpeed's engines read those of their own number.
READERS = [("plain", 1), ("FSDP2 in shards", 3), ("ZeRO 2", 3)]


def _name(cell: tuple[str, bool]) -> str:
    return f"{cell[0]} {'blocking' if cell[1] else 'in the background'}"


def killed_ranks(folder: Path, draw: Draw) -> None:
    """Runs two processes until the draw has come true; nobody may be left waiting."""
    with running(goes_on_until_it_is_killed, 2, str(folder), draw) as job:
        deadline = time.monotonic() + PATIENCE_SECONDS
        codes = [await_end(process, deadline) for process in job.processes]
        outcomes = [job.outcome(rank) for rank in range(2)]
    dead = {"this rank": [draw.rank], "other rank": [1 - draw.rank], "all ranks": [0, 1]}[draw.victim]
    expected = [-signal.SIGKILL if rank in dead else 1 for rank in range(2)]
    assert codes == expected, (draw, outcomes)
    for rank in {0, 1} - set(dead):
        assert f"rank {dead[0]}" in outcomes[rank].stderr, (draw, outcomes)


def killed_launcher(folder: Path, draw: Draw) -> None:
    """The same under a launcher, which is killed; its workers may not outlive it."""
    program = Path(__file__).with_name("killed_saves.py")
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    command += [str(program), str(folder), json.dumps(asdict(draw))]
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, text=True)
    STARTED.append(launcher)
    code = launcher.wait(timeout=PATIENCE_SECONDS)
    assert code == -signal.SIGKILL, (draw, (folder / "output").read_text())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(lives(pid) for pid in _workers(folder)):
        assert time.monotonic() < deadline, f"{draw}: workers outlive their launcher"
        time.sleep(0.01)


def _workers(folder: Path) -> Iterator[int]:
    for words in _told(folder):
        if words[0] == "pids":
            yield from map(int, words[1:])


def _told(folder: Path) -> list[list[str]]:
    path = folder / "told"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def killed_in_a_save(folder: Path, draw: Draw) -> tuple[int | None, int]:
    """Kills once, and looks at what is visible afterwards.

    Returns:
        What the run continued from, and what can be continued from now, in steps.
    """
    from accelerate_cpp.checkpoint.folder import numbered
    from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, why_not_whole
    from accelerate_cpp.checkpoint.participants import Participants

    (folder / "told").unlink(missing_ok=True)
    (killed_launcher if draw.victim == "launcher" else killed_ranks)(folder, draw)
    lines = _told(folder)
    (loaded,) = [int(steps) for word, *rest in lines if word == "loaded" for steps in rest] or [None]
    (killed,) = [int(steps) for word, *rest in lines if word == "killing" for steps in rest]
    saved = max(int(steps) for word, *rest in lines if word == "saved" for steps in rest)
    visible = numbered(folder / "checkpoints")
    for path in visible.values():
        assert (path / MANIFEST_NAME).is_file(), (draw, path)
        assert why_not_whole(path, Participants()) is None, (draw, path)
    newest = max(visible) + 1
    if draw.victim == "launcher":  # until they notice it, workers go on
        assert newest >= saved, (draw, lines)
    else:
        assert saved == killed - 1, (draw, lines)
        assert newest in _possible(draw, saved, killed), (draw, newest, lines)
    return loaded, newest


def _possible(draw: Draw, saved: int, killed: int) -> tuple[int, ...]:
    """What may be the newest checkpoint: ``killed`` is the one in whose save it happened, ``saved`` the one before."""
    if draw.phase in ("collecting", "copying"):  # collectives come after them, in which all are needed
        return (saved,)
    if draw.phase == "removing old ones":
        return (killed,)
    is_missed = draw.victim != "other rank" and draw.phase not in ("agreeing", "moving")
    return (saved,) if is_missed else (saved, killed)  # what the other rank writes may already be on the disk


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("no_launcher_is_left")
@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_kills_inside_saves_lose_nothing(tmp_path: Path, cell: tuple[str, bool]) -> None:
    layout, blocking = cell
    if layout in ENGINES and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    chance, newest = random.Random(f"{SEED} {_name(cell)}"), None
    for number in range(KILLS):
        draw = Draw.of(layout, blocking, chance)
        print(f"{number} {draw}", flush=True)
        loaded, left = killed_in_a_save(tmp_path, draw)
        assert loaded == newest, (draw, "the run did not continue from the newest checkpoint")
        newest = left
    assert run_processes(loads, 2, str(tmp_path), layout, timeout=PATIENCE_SECONDS) == [newest] * 2
    if layout not in ENGINES:
        reader, ranks = chance.choice(READERS)
        found = run_processes(loads, ranks, str(tmp_path), reader, timeout=PATIENCE_SECONDS)
        assert found == [newest] * ranks, (reader, ranks)


def test_draws_reach_all_phases_and_victims() -> None:
    chance = random.Random(1)
    for layout, blocking in CELLS:
        draws = [Draw.of(layout, blocking, chance) for _ in range(400)]
        assert {draw.phase for draw in draws} == {phase for phase, _ in phases_of(layout, blocking)}
        assert {draw.victim for draw in draws} == set(VICTIMS)
        assert {draw.rank for draw in draws} == {0, 1}
