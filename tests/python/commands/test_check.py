"""accelerate-cpp check: its flags and exit status; what it finds is in tests/distributed/test_check.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]

LOOP = """
import torch
from accelerate_cpp import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(10**9):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("line", "status"), [("", 0), ("raise ValueError('no data')\n", 1)])
def test_the_status_tells_whether_there_are_errors(run: Run, tmp_path: Path, line: str, status: int) -> None:
    script, report = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text(LOOP.replace("model =", line + "model =", 1))
    done = run("check", "--cpu", "--num_processes", 1, "--json", report, script)
    assert done.returncode == status, done.stdout + done.stderr
    assert f"{status} error{'' if status else 's'}, 0 warnings, 0 notes" in done.stdout
    assert json.loads(report.read_text())["exit_status"] == status


def test_a_script_that_is_not_there_is_one_sentence(run: Run, tmp_path: Path) -> None:
    done = run("check", "--cpu", tmp_path / "none.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no script" in done.stderr


@pytest.mark.parametrize("flag", ["--steps", "--wait", "--time_limit"])
def test_numbers_are_at_least_one(run: Run, flag: str) -> None:
    done = run("check", flag, 0, "train.py")
    assert done.returncode == 2
    assert f"{flag}: expected an integer of at least 1" in done.stderr


def test_the_documentation_has_every_code_and_no_other() -> None:
    root = Path(__file__).resolve().parents[3]
    sources = [*root.glob("python/accelerate_cpp/check/*.py"), root / "python/accelerate_cpp/commands/check.py"]
    codes = {code for path in sources for code in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', path.read_text())}
    documented = re.findall(r"^\| `([a-z-]+)` \|", (root / "docs/check.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(codes)
