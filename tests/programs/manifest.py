"""What ``programs.json`` says of each program, and how programs are started and read.

A program comes from the folder that PROGRAMS_DIR names, from an installed package, or is a re-creation of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
STEPS, EARLIER, BATCH = 6, 2, 4
"""Steps in all, between checkpoints, and samples of a step on all processes together."""


@dataclass(frozen=True)
class Convention:
    """How a kind of program is told what to do, and where it leaves its figures.

    Args:
        options: from the folder of its output and the samples of one process.
        resume: from the folder of a checkpoint.
        figures: the values of a name, one for each step that was trained, from the folder of its output.
    """

    options: Callable[[Path, int], list[str]]
    resume: Callable[[Path], list[str]]
    figures: Callable[[Path, str], list[float]]


def _flags(**options: object) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _own_options(output: Path, batch: int) -> list[str]:
    steps = {"max_train_steps": STEPS, "checkpointing_steps": EARLIER, "checkpoints_total_limit": 9}
    return _flags(output_dir=output, train_batch_size=batch, **steps)


def _loop_options(output: Path, batch: int) -> list[str]:
    return _flags(output_dir=output, per_device_train_batch_size=batch, max_train_steps=STEPS)


def _own_figures(output: Path, name: str) -> list[float]:
    return list(json.loads((output / "losses.json").read_text())[name])


def _trainer_options(output: Path, batch: int) -> list[str]:
    steps = {"max_steps": STEPS, "save_steps": EARLIER, "logging_steps": 1, "learning_rate": 1e-2, "seed": 7}
    where = {"use_cpu": True, "bf16": False, "report_to": "none"}
    return _flags(output_dir=output, per_device_train_batch_size=batch, **steps, **where)


def _trainer_figures(output: Path, name: str) -> list[float]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def _results_of_lm_eval(output: Path, name: str) -> list[float]:
    """Of each task the metric."""
    written = sorted(output.rglob("results_*.json"))[-1]
    return [result[name] for _, result in sorted(json.loads(written.read_text())["results"].items())]


CONVENTIONS = {
    "program.py": Convention(_own_options, lambda _: ["--resume_from_checkpoint"], _own_figures),
    "transformers.TrainingArguments": Convention(
        _trainer_options, lambda checkpoint: _flags(resume_from_checkpoint=checkpoint), _trainer_figures
    ),
    "run_glue_no_trainer.py": Convention(
        _loop_options, lambda checkpoint: _flags(resume_from_checkpoint=checkpoint), _own_figures
    ),
    "lm_eval": Convention(
        lambda output, batch: _flags(output_path=output, batch_size=batch), lambda _: [], _results_of_lm_eval
    ),
}


@dataclass(frozen=True)
class Program:
    """A program of the manifest.

    Args:
        of: the repository in which the program is, ``owner/name``.
        path: its path there.
        arguments: those that no convention has; ``{inputs}`` stands for the folder that ``make_inputs.py`` fills.
        wants: packages that it imports.
        convention: a name in :data:`CONVENTIONS`.
        here: the re-creation, a file beside this one; or else
        module: the program itself in an installed package.
        figures: names of what is compared.
        differs: why two processes do not have the figures of one, on the original either; empty where they have.
        processes: the numbers of processes on which it runs.
        checkpoint: the folder that has the state after ``EARLIER`` steps; empty where a program writes none.
    """

    name: str
    of: str
    path: str
    arguments: Sequence[str]
    wants: Sequence[str]
    convention: str = "program.py"
    here: str = ""
    module: str = ""
    figures: Sequence[str] = ("losses",)
    differs: str = ""
    processes: Sequence[int] = (1, 2)
    checkpoint: str = f"checkpoint-{EARLIER}"

    def missing(self) -> list[str]:
        """Packages that it wants and that are not installed."""
        return [name for name in self.wants if importlib.util.find_spec(name) is None]

    def source(self) -> list[str]:
        """What a launcher is to run: the program of ``PROGRAMS_DIR``, of its package, or of ours."""
        if self.here:
            return [str(FOLDER / self.here)]
        clones = os.environ.get("PROGRAMS_DIR")
        if clones and (file := Path(clones, self.of.rpartition("/")[2], self.path)).exists():
            return [str(file)]
        return ["-m", self.module]

    def command(self, inputs: Path, output: Path, num_processes: int) -> list[str]:
        """What stands behind a launcher's own options."""
        arguments = [argument.format(inputs=inputs) for argument in self.arguments]
        return [*self.source(), *arguments, *self.conventions.options(output, BATCH // num_processes)]

    @property
    def conventions(self) -> Convention:
        return CONVENTIONS[self.convention]

    def read(self, output: Path) -> dict[str, list[float]]:
        return {name: self.conventions.figures(output, name) for name in self.figures}


def programs() -> list[Program]:
    entries: list[dict[str, Any]] = json.loads((FOLDER / "programs.json").read_text())
    return [Program(**entry) for entry in entries]
