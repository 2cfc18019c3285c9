"""Launches of which one rank ends well, or raises, where the others need it: it is named, and they do not wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_SECONDS = 300.0
JOINS = """
from accelerate_cpp import Accelerator
Accelerator()
"""
LEAVES_ITS_PID = """
import os, sys, time
if os.environ["RANK"] == "1":
    with open("pid.part", "w") as file: file.write(str(os.getpid()))
    os.rename("pid.part", "pid")
    """
AWAITS_THAT_END = """
while not os.path.exists("pid"): time.sleep(0.01)
pid = open("pid").read()
while open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0] != "Z": time.sleep(0.01)
"""
TRAINS = """
import os, sys, torch
from accelerate_cpp import Accelerator
from accelerate_cpp.utils import InitProcessGroupKwargs
backend, case, culprit = sys.argv[1], sys.argv[2], int(sys.argv[3])
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
is_culprit = accelerator.process_index == culprit

def fault(where):
    if is_culprit and case == f"{where} raises":
        raise ValueError("mine alone")
    if is_culprit and case == f"{where} exits":
        sys.exit(7)

class Registered:
    def state_dict(self):
        fault("save")
        return {}

    def load_state_dict(self, state):
        fault("load")

model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.register_for_checkpointing(Registered())
for step in range(3):
    if step == 1:
        if is_culprit and case == "leaves":
            sys.exit(0)
        if case != "leaves":
            accelerator.save_state("checkpoint")
            accelerator.load_state("checkpoint")
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def launched(folder: Path, script: str, num_processes: int, *arguments: str) -> tuple[int, str]:
    """The exit status of a launch, and what it said on standard error."""
    (folder / "train.py").write_text(script)
    flags = ["--cpu", "--num_processes", str(num_processes)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", *flags, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("culprit", [0, 1])
def test_rank_that_ends_before_it_joins_does_not_keep_the_others_waiting(
    tmp_path: Path, num_processes: int, culprit: int
) -> None:
    leaves = f"import os, sys\nif os.environ['RANK'] == '{culprit}': print('no data', file=sys.stderr); sys.exit()\n"
    status, said = launched(tmp_path, leaves + JOINS, num_processes)
    assert status == 1
    sentence = (
        rf"^rank {culprit} \(.*\) left first: it ended with exit code 0 before it joined the process group, where "
    )
    assert re.search(sentence + r"ranks? [\d,-]+ waited for it\nno data\n\Z", said, re.MULTILINE), said


def test_rank_that_ends_before_the_others_begin_to_join_is_noticed_then(tmp_path: Path) -> None:
    status, said = launched(tmp_path, LEAVES_ITS_PID + "sys.exit()" + AWAITS_THAT_END + JOINS, 2)
    assert (status, "rank 1 (" in said, "before it joined" in said) == (1, True, True), said


def test_ranks_that_join_no_group_may_end_at_different_times(tmp_path: Path) -> None:
    script = """
import os, time
rank = int(os.environ["RANK"])
while rank and not os.path.exists(f"ended-{rank - 1}"): time.sleep(0.01)
open(f"ended-{rank}", "w").close()
"""
    status, said = launched(tmp_path, script, 3)
    assert status == 0
    few_cores = r"accelerate-cpp launch: 3 processes share [12] cores?: .*\n"
    assert re.fullmatch(f"({few_cores})?", said), said


def test_rank_that_could_not_join_and_goes_on_alone_is_not_ended(tmp_path: Path) -> None:
    leaves = LEAVES_ITS_PID + "\n    while not os.path.exists('gave-up'): time.sleep(0.01)\n    sys.exit()\n"
    tries = """
from datetime import timedelta
from accelerate_cpp import Accelerator
from accelerate_cpp.utils import InitProcessGroupKwargs
try:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1))])
except Exception:
    open("gave-up", "w").close()
"""
    script = leaves + tries + AWAITS_THAT_END + "print('went on alone', file=sys.stderr)\n"
    status, said = launched(tmp_path, script, 2)
    assert (status, "went on alone" in said) == (0, True), said


@pytest.mark.parametrize("backend", ["cpu:shm", pytest.param("gloo", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("num_processes", "culprit"),
    [(2, 1), *(pytest.param(*one, marks=pytest.mark.long) for one in [(2, 0), (4, 0), (4, 3)])],
)
def test_rank_that_leaves_in_mid_training_is_named(
    tmp_path: Path, backend: str, num_processes: int, culprit: int
) -> None:
    status, said = launched(tmp_path, TRAINS, num_processes, backend, "leaves", str(culprit))
    assert status == 1
    sentence = rf"^rank {culprit} \(.*\) left first: it ended with exit code 0 while others still needed it\n"
    assert re.search(sentence, said, re.MULTILINE), said


@pytest.mark.parametrize(("num_processes", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize(("fault", "status"), [("load raises", 1), ("load exits", 7)])
@pytest.mark.long
def test_rank_at_fault_while_loading_is_named(
    tmp_path: Path, num_processes: int, culprit: int, fault: str, status: int
) -> None:
    _check_fault(launched(tmp_path, TRAINS, num_processes, "cpu:shm", fault, str(culprit)), culprit, status)


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize(("fault", "status"), [("save raises", 1), ("save exits", 7)])
@pytest.mark.long
def test_rank_at_fault_while_saving_is_named(tmp_path: Path, num_processes: int, fault: str, status: int) -> None:
    _check_fault(launched(tmp_path, TRAINS, num_processes, "cpu:shm", fault, "0"), 0, status)


def _check_fault(ended: tuple[int, str], culprit: int, status: int) -> None:
    assert ended[0] == status
    told = re.search(rf"^rank {culprit} \(.*\) failed first: exit code {status}\n(.*)\Z", ended[1], re.MULTILINE | re.S)
    assert told, ended[1]
    # Of the others there is a line each, which says that they only follow, and no traceback.
    own = re.sub(r"^ranks? [\d, -]+: accelerate_cpp\.errors\.OtherRankFailed: .*\n", "", told[1], flags=re.MULTILINE)
    assert "OtherRankFailed" not in own
    assert status != 1 or "ValueError: mine alone\n" in told[1]


@pytest.mark.parametrize(
    ("leaves", "sentence"),
    [
        ("before", "rank 1 left first: it ended with exit code 0 before it joined the process group, where rank"),
        ("after", "rank 1 left first: it ended with exit code 0 while others still needed it"),
    ],
)
def test_launched_function_that_returns_early_on_one_rank_is_an_error(
    tmp_path: Path, leaves: str, sentence: str
) -> None:
    (tmp_path / "launches.py").write_text(
        "import os\n"
        "from accelerate_cpp import notebook_launcher\n"
        "def function(leaves):\n"
        "    import torch\n"
        "    if leaves == 'before' and os.environ['RANK'] == '1': return\n"
        "    from accelerate_cpp import Accelerator\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    if accelerator.process_index == 1: return\n"
        "    accelerator.gather(torch.ones(1))\n"
        f"notebook_launcher(function, ({leaves!r},), num_processes=2)\n"
    )
    done = subprocess.run(
        [sys.executable, "launches.py"],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    assert sentence in done.stderr, done.stderr
    if leaves == "after":  # where the other was that waited
        assert "accelerator.gather(torch.ones(1))" in done.stderr
