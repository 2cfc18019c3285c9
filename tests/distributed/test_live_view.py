"""The live view of real runs: in a log, on a terminal, and in a cell."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from test_notebooks import patient_client

# Rank 1 takes longer in each step. That is what is looked for; nothing waits for it.
TRAINS = """
import sys, time
import torch
from accelerate_cpp import Accelerator

def train(steps, late=0.05):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(steps):
        loss = model(torch.ones(4, 8)).pow(2).mean()
        if accelerator.process_index == 1:
            time.sleep(late)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"done {accelerator.process_index}")
"""
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--monitor", "train.py"]
# What takes time of a processor, of a disk that has to write, and of one from which pages of a mapped file are read.
SLOW = """
import mmap, os

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass

def write_through(seconds):
    end = time.monotonic() + seconds
    with open("written", "wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(os.urandom(1 << 16))
            os.fsync(file.fileno())

def read_pages(seconds):
    end = time.monotonic() + seconds
    with open("mapped", "a+b") as file:
        if not file.tell():
            file.write(os.urandom(64 << 20))
            file.flush()
            os.fsync(file.fileno())
        while time.monotonic() < end:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                for place in range(0, len(pages), mmap.PAGESIZE):
                    pages[place]
                    if time.monotonic() >= end:
                        break

"""
NAMED = re.compile(r"rank (\d+) is slower than the others by (\d+) ms a step")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINS + "train(int(sys.argv[1]), float(sys.argv[2]))\n")
    return tmp_path


def launch(*flags: str, steps: int, late: float = 0.05) -> list[str]:
    return [*LAUNCH[:-1], *flags, LAUNCH[-1], str(steps), str(late)]


@pytest.mark.parametrize(("num_processes", "late"), [pytest.param(2, 0.05, marks=pytest.mark.long), (3, 0.5)])
def test_rank_that_is_slower_is_named_within_ten_steps(script: Path, num_processes: int, late: float) -> None:
    """By 50 ms where that is more than what a machine that does other work besides adds to each rank."""
    run = subprocess.run(
        launch("--num_processes", str(num_processes), steps=10, late=late),
        cwd=script,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    named = NAMED.findall(run.stderr)
    assert {rank for rank, _ in named} == {"1"}
    assert sorted(run.stdout.split("\n")) == ["", *(f"done {rank}" for rank in range(num_processes))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "causes"),
    [
        ("time.sleep(0.05)", {"it neither computes nor reads a disk"}),
        # Where other programs use the cores, it gets them less than it asks for.
        ("burn(0.05)", {"it computes longer", "it waits for a core, which others use"}),
        ("write_through(0.3)", {"it waits for a disk"}),
        ("read_pages(0.3)", {"it waits for pages that are read from a disk or from swap"}),
    ],
)
def test_the_cause_is_told_with_the_rank(script: Path, what: str, causes: set[str]) -> None:
    text = (script / "train.py").read_text().replace("def train", SLOW + "def train").replace("time.sleep(late)", what)
    (script / "train.py").write_text(text)
    run = subprocess.run(
        launch("--num_processes", "2", steps=100), cwd=script, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    told = re.findall(r"rank 1 is slower .*", run.stderr)
    assert any(cause in line for cause in causes for line in told), run.stderr


def test_lone_process_is_monitored_too(script: Path) -> None:
    run = subprocess.run(
        launch("--num_processes", "1", steps=3), cwd=script, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert "accelerate-cpp: step " in run.stderr


def test_terminal_ends_with_the_table_below_all_output(script: Path) -> None:
    terminal, ours = pty.openpty()
    run = subprocess.Popen(launch("--num_processes", "2", steps=10, late=0.5), cwd=script, stdout=ours, stderr=ours)
    os.close(ours)
    text = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            text += chunk
    except OSError:  # the last process that had the terminal has ended
        pass
    os.close(terminal)
    assert run.wait(240) == 0, text.decode()
    shown = text.decode().replace("\r\n", "\n")
    last = shown.rpartition("\x1b[J")[2].splitlines()
    assert last[1].split() == ["rank", "step", "steps/s", "loss", "memory", "waiting"]
    assert [line.split()[:2] for line in last[2:4]] == [["0", "10"], ["1", "10"]]
    assert NAMED.fullmatch(last[4])
    above = shown.rpartition("\x1b[J")[0]
    assert "done 0\n" in above
    assert "[1] done 1\n" in above


@pytest.mark.parametrize("kind", ["forks", "helper"])
@pytest.mark.parametrize("wished", [True, False])
@pytest.mark.long
def test_cell_shows_a_run_of_some_seconds_unless_that_is_turned_off(tmp_path: Path, kind: str, wished: bool) -> None:
    first_use = "import torch\ntorch.cuda.is_initialized = lambda: True\n" if kind == "helper" else ""
    off = "" if wished else "import os\nos.environ['ACCELERATE_CPP_LIVE_VIEW'] = '0'\n"
    cells = [
        "from accelerate_cpp import notebook_launcher\n" + TRAINS + off + first_use,
        "notebook_launcher(train, (80,), num_processes=2)",  # 4 s, as rank 1 sleeps
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    patient_client(notebook, tmp_path).execute()
    outputs = notebook.cells[1].outputs
    assert {"done 0", "done 1"} <= set("".join(one.get("text", "") for one in outputs).split("\n"))
    views = [one.data for one in outputs if one.output_type == "display_data"]
    if not wished:
        assert views == []
        return
    [view] = views
    assert [line.split()[:2] for line in view["text/plain"].splitlines()[1:3]] == [["0", "80"], ["1", "80"]]
    assert NAMED.search(view["text/html"])
