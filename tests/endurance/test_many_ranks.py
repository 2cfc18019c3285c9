"""32 ranks on a machine with few cores: a launch says what will be slow, and ends as one of 2 ranks does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launched import outputs_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) >= 32, reason="each of 32 ranks has a core of its own"),
]

RANKS = 32
PATIENCE_SECONDS = 1200.0
TRAINS = """
import torch
from accelerate_cpp import Accelerator

run = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    loss = model(torch.full((4, 64), float(run.process_index))).square().mean()
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
ranks = run.gather(torch.tensor([run.process_index])).tolist()
sums = run.gather(model.module.weight.detach().double().sum().reshape(1)).tolist()
assert ranks == list(range(run.num_processes)), ranks
assert len(set(sums)) == 1, sums
"""


def launched(folder: Path, script: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a launch of all ranks."""
    (folder / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", str(RANKS), "train.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = outputs_of(process, PATIENCE_SECONDS)
    return process.returncode, out.decode(), err.decode()


def test_they_train_and_the_launch_says_what_is_slow(tmp_path: Path) -> None:
    script = TRAINS + "run.print('trained on', run.num_processes)\n"
    status, out, err = launched(tmp_path, script)
    assert (status, out) == (0, f"trained on {RANKS}\n"), err
    said = r"accelerate-cpp launch: 32 processes share (\d+) cores?: to start, and each step, takes about (\S+) times"
    found = re.search(said, err)
    assert found is not None, err
    assert float(found[2]) == pytest.approx(RANKS / int(found[1]), rel=0.05)


def test_the_one_that_fails_is_named_and_all_end(tmp_path: Path) -> None:
    """The pipes of all ranks are closed when the launch has ended, or :func:`outputs_of` fails."""
    script = (
        TRAINS
        + "if run.process_index == 21: raise ValueError('the data of this rank are broken')\n"
        + "run.gather(model.module.weight)\n"
    )
    status, _, err = launched(tmp_path, script)
    assert status == 1, err
    assert "rank 21" in err.split("failed first")[0].splitlines()[-1], err
    assert err.rstrip().endswith("ValueError: the data of this rank are broken"), err
