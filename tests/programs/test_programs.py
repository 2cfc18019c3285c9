"""Public programs, run by this package through the alias and by the original.

``programs.json`` says which: programs as they are from the folder that PROGRAMS_DIR names or from installed packages,
and re-creations of the others; no foreign file is here. Each is run on one process and on two, undisturbed, and from
a checkpoint that the other side has written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from manifest import EARLIER, FOLDER, STEPS, Program, programs

SHARED = FOLDER.parent / "third_party"  # the tiny language model
SIDES = ("accelerate", "accelerate_cpp")
PATIENCE_SECONDS = 600.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_PATH = os.pathsep.join(map(str, (FOLDER / "witness", FOLDER, SHARED)))

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, which are made once."""
    folder = tmp_path_factory.mktemp("inputs")
    start([sys.executable, str(FOLDER / "make_inputs.py"), str(folder)], folder)
    return folder


def start(command: list[str], folder: Path) -> None:
    """Runs the command in the folder, to its end."""
    environment = os.environ | OFFLINE | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": ON_PATH, "WITNESS_FOLDER": str(folder), "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


def launcher(side: str, num_processes: int) -> list[str]:
    if side == "accelerate_cpp":
        options = ["--alias", "--cpu", "--num_processes", str(num_processes)]
        return [sys.executable, "-m", "accelerate_cpp.commands.launch", *options]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


class Runs:
    """All runs of a program."""

    def __init__(self, program: Program, inputs: Path, folder: Path) -> None:
        self._program = program
        self._inputs = inputs
        self._folder = folder

    def output(self, side: str, num_processes: int) -> Path:
        """The folder of an undisturbed run."""
        return self._folder / f"{side}-{num_processes}"

    def undisturbed(self, side: str, num_processes: int) -> dict[str, list[float]]:
        return self._run(side, num_processes, self.output(side, num_processes))

    def resumed(self, side: str, num_processes: int) -> dict[str, list[float]]:
        """From the other side's checkpoint."""
        (writer,) = set(SIDES) - {side}
        checkpoint = self._program.checkpoint
        output = self._folder / f"{writer}-{side}-{num_processes}"
        shutil.copytree(self.output(writer, num_processes) / checkpoint, output / checkpoint)
        return self._run(side, num_processes, output, *self._program.conventions.resume(output / checkpoint))

    def _run(self, side: str, num_processes: int, output: Path, *flags: str) -> dict[str, list[float]]:
        output.mkdir(exist_ok=True)
        command = self._program.command(self._inputs, output, num_processes)
        start([*launcher(side, num_processes), *command, *flags], output)
        said = [json.loads(file.read_text()) for file in output.glob("witness-*.json")]
        assert said == [{"processes": num_processes, "from": side}] * num_processes
        return self._program.read(output)


def alike(expected: dict[str, list[float]]) -> dict[str, object]:
    """Equal to four digits, since sums over another number of processes have another order."""
    return {name: pytest.approx(values, rel=1e-4, abs=2e-4) for name, values in expected.items()}


def later(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    """Those after the checkpoint; programs report the earlier ones again, or do not."""
    return {name: values[EARLIER - STEPS :] for name, values in figures.items()}


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_program_runs_and_resumes_as_on_the_original(program: Program, inputs: Path, tmp_path: Path) -> None:
    if program.missing():
        pytest.skip(f"{', '.join(program.missing())} is not installed")
    runs = Runs(program, inputs, tmp_path)
    expected = {}
    with ThreadPoolExecutor(len(SIDES)) as sides:
        for num_processes in program.processes:
            original, ours = sides.map(runs.undisturbed, SIDES, [num_processes] * len(SIDES))
            assert ours == alike(original)
            expected[num_processes] = original
        if not program.differs:
            assert expected[program.processes[-1]] == alike(expected[1])
        if program.checkpoint:
            for resumed in sides.map(runs.resumed, SIDES, [2] * len(SIDES)):
                assert later(resumed) == alike(later(expected[2]))
