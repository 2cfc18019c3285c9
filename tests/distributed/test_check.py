"""``accelerate-cpp check`` on two real processes: small scripts with one mistake each, and healthy ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).with_name("check_scripts")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMAND = [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "check", "--cpu", "--num_processes", "2"]
# The others are run by `make test-full`.
ALWAYS = (
    "broken_script_of_the_original",
    "broken_schedule_of_prepared_length",
    "healthy_schedule_and_metrics",
)


def check(folder: Path, *arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status, the findings, and what was printed."""
    command = [*COMMAND, "--json", folder / "report.json", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "report.json").read_text())["findings"], done.stdout + done.stderr


def alarms(findings: list[dict[str, Any]]) -> set[str]:
    """The codes of errors and warnings; how many cores this machine has is not the scripts' fault."""
    return {one["code"] for one in findings if one["level"] != "note"} - {"too-many-processes"}


def corpus() -> list[Any]:
    scripts = sorted(path for path in SCRIPTS.glob("*_*.py"))
    return [
        pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else (pytest.mark.long,)) for path in scripts
    ]


@pytest.mark.parametrize("script", corpus())
def test_mistakes_are_found_and_healthy_scripts_left_alone(tmp_path: Path, script: Path) -> None:
    first, second, *_ = script.read_text().splitlines()
    expected = set(first.removeprefix("# expects: ").split()) - {"nothing"}
    flags = second.removeprefix("# flags: ").split() if second.startswith("# flags: ") else []
    status, findings, printed = check(tmp_path, *flags, script)
    found = alarms(findings)
    assert bool(found) == bool(expected), printed
    assert found <= expected, printed
    assert status == any(one["level"] == "error" for one in findings)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("digits*.py")), ids=lambda path: path.stem)
@pytest.mark.long
def test_the_examples_have_no_errors_but_where_accelerate_is_missing(tmp_path: Path, example: Path) -> None:
    _, findings, printed = check(tmp_path, example)
    expected = set() if "Accelerator" in example.read_text() else {"no-accelerator"}
    assert {one["code"] for one in findings if one["level"] == "error"} == expected, printed


def test_a_process_that_dies_is_named_with_its_end(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os\nfrom accelerate_cpp import Accelerator\n"
        "accelerator = Accelerator()\nif accelerator.process_index == 1:\n    os._exit(7)\n"
        "accelerator.wait_for_everyone()\n"
    )
    status, findings, _ = check(tmp_path, script)
    assert status == 1
    assert [(one["code"], one["ranks"]) for one in findings if one["level"] == "error"] == [("worker-crashed", [1])]
    assert "exit code 7" in findings[0]["what"]


def test_a_script_that_does_not_end_is_stopped_and_the_place_named(tmp_path: Path) -> None:
    script = tmp_path / "forever.py"
    script.write_text("import threading\n\nthreading.Event().wait()\n")
    status, findings, _ = check(tmp_path, "--time_limit", "10", script)
    assert status == 1
    assert {(one["code"], one["where"]) for one in findings if one["level"] == "error"} == {
        ("too-slow", "forever.py:3")
    }


def test_an_interrupt_ends_the_check_without_a_report(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import threading\n\nprint('waiting', flush=True)\nthreading.Event().wait()\n")
    process = subprocess.Popen(
        [*COMMAND, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    os.kill(process.pid, signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130
    assert b"accelerate-cpp check:" not in printed


def test_a_mesh_is_told_with_what_its_ranks_hold(tmp_path: Path) -> None:
    _, findings, printed = check(tmp_path, "--num_machines", "2", SCRIPTS / "healthy_split_layers.py")
    (one,) = (one for one in findings if one["code"] == "mesh-layout")
    assert one["level"] == "note"
    weights = 4 * (4 * 4 + 4 + 4 * 2 + 2)  # of both layers half, and the whole bias of the second
    assert one["what"].startswith(f"the mesh is tp 2. ranks 0, 1: {weights} B of weights and 0 B of optimizer states")
    assert "On 2 machines with 1 rank each, along tp ranks communicate between hosts" in printed.replace("\n  ", " ")


SAVES = """
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from accelerate_cpp import Accelerator
from accelerate_cpp.utils import ProjectConfiguration

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.project_configuration.iteration = 1  # as after a checkpoint of an earlier run
accelerator.save_state()
accelerator.load_state()
accelerator.save_model(model, "state")
name = f"{accelerator.process_index}.safetensors"
save_file({"a": torch.ones(2)}, name)
assert load_file(name)["a"].sum() == 2
with safe_open(name, "pt") as file:
    assert file.get_tensor("a").sum() == 2
torch.save([1], f"{name}.pt")
assert torch.load(f"{name}.pt") == [1]
"""


def test_nothing_is_overwritten_and_what_the_check_has_saved_is_read(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    kept = [tmp_path / "run" / "checkpoints" / "checkpoint_0", tmp_path / "state"]
    kept = [folder / "model.safetensors" for folder in kept] + [
        tmp_path / f"{rank}.safetensors{more}" for rank in range(2) for more in ("", ".pt")
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    status, findings, printed = check(tmp_path, script)
    assert (status, alarms(findings)) == (0, set()), printed
    assert [path.read_text() for path in kept] == ["precious"] * len(kept)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == len(kept) + 2


SAVES_IN_JAX = """
import jax.numpy as jnp
from accelerate_cpp.jax import load_state, save_state

save_state("state", {"step": 3, "w": jnp.ones(2)})
assert load_state("state", {"step": 0, "w": jnp.zeros(2)})["step"] == 3
"""


def test_checkpoints_of_programs_in_jax_stay_as_they_are(tmp_path: Path) -> None:
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    script = tmp_path / "saves.py"
    script.write_text(SAVES_IN_JAX)
    kept = tmp_path / "state" / "state.safetensors"
    kept.parent.mkdir()
    kept.write_text("precious")
    status, findings, printed = check(tmp_path, script)
    assert (status, alarms(findings)) == (0, set()), printed
    assert (kept.read_text(), len(list(kept.parent.iterdir()))) == ("precious", 1)
