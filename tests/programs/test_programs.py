"""Re-creations of public programs, run by this package through the alias and by the original.

``programs.json`` says of which programs; no file of theirs is here. Each is run on one process and on two, undisturbed,
and from a checkpoint that either side has written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SHARED = FOLDER.parent / "third_party"  # the tiny language model
PROGRAMS: list[dict[str, Any]] = json.loads((FOLDER / "programs.json").read_text())
SIDES = ("accelerate_cpp", "accelerate")
STEPS, EARLIER = 6, 2
BATCH = 4
PATIENCE_SECONDS = 600.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def launcher(side: str, num_processes: int) -> list[str]:
    if side == "accelerate_cpp":
        options = ["--alias", "--cpu", "--num_processes", str(num_processes)]
        return [sys.executable, "-m", "accelerate_cpp.commands.launch", *options]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


def run(side: str, program: dict[str, Any], num_processes: int, folder: Path, *flags: str) -> list[float]:
    """The losses that the program has written."""
    options = ["--output_dir", str(folder), "--train_batch_size", str(BATCH // num_processes), *flags]
    done = subprocess.run(
        [*launcher(side, num_processes), str(FOLDER / program["here"]), *program["arguments"], *options],
        env=os.environ | OFFLINE | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHARED)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((folder / "losses.json").read_text())
    assert (report["processes"], report["from"].partition(".")[0]) == (num_processes, side)
    return list(report["losses"])


def copied(source: Path, target: Path) -> Path:
    """A folder with the checkpoint of the earlier step alone."""
    target.mkdir()
    shutil.copytree(source / f"checkpoint-{EARLIER}", target / f"checkpoint-{EARLIER}")
    return target


@pytest.mark.parametrize("program", PROGRAMS, ids=[program["name"] for program in PROGRAMS])
def test_program_runs_and_resumes_as_on_the_original(program: dict[str, Any], tmp_path: Path) -> None:
    missing = [name for name in program["wants"] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    losses = {}
    for side in SIDES:
        for num_processes in (1, 2):
            folder = tmp_path / f"{side}-{num_processes}"
            folder.mkdir()
            every = ("--checkpointing_steps", str(EARLIER), "--checkpoints_total_limit", "9")
            losses[side, num_processes] = run(side, program, num_processes, folder, *every)
    expected = losses["accelerate", 1]
    assert len(expected) == STEPS
    for found in losses.values():
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-4)  # trainers round to four digits
    for writer, reader in ((SIDES[0], SIDES[0]), SIDES, SIDES[::-1]):
        for num_processes in (1, 2):
            folder = copied(tmp_path / f"{writer}-{num_processes}", tmp_path / f"{writer}-{reader}-{num_processes}")
            resumed = run(reader, program, num_processes, folder, "--resume_from_checkpoint")
            assert resumed[-(STEPS - EARLIER) :] == pytest.approx(expected[EARLIER:], rel=1e-4, abs=2e-4)
