"""Trackers in two real processes: one logs, the other may call everything; and the example, whose files are read."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

REPOSITORY = Path(__file__).resolve().parents[2]


def make(name: str, everywhere: bool = False, fails: bool = False) -> Any:
    """A tracker that keeps what it is told."""
    from accelerate_cpp.tracking import GeneralTracker

    class Mine(GeneralTracker):
        requires_logging_directory = False

        def __init__(self) -> None:
            self.name, self.main_process_only = name, not everywhere
            super().__init__()
            self.told: list[str] = []

        @property
        def tracker(self) -> list[str]:
            return self.told

        def start(self) -> None:
            if fails:
                raise RuntimeError("no disk to log to")
            self.told.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.told.append(f"store {values}")

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.told.append(f"log {values} {step} {kwargs}")

        def finish(self) -> None:
            self.told.append("finish")

    return Mine()


def wandb_double() -> list[str]:
    """A module wandb that keeps what it is told."""
    from types import ModuleType
    from unittest.mock import MagicMock

    told: list[str] = []
    run = MagicMock()
    run.log.side_effect = lambda values, step: told.append(f"log {values} {step}")
    run.finish.side_effect = lambda: told.append("finish")
    module = ModuleType("wandb")
    module.init = lambda **options: told.append(f"init {options}") or run  # type: ignore[attr-defined]
    module.Image = object  # type: ignore[attr-defined]
    sys.modules["wandb"] = module
    return told


def logged() -> dict[str, Any]:
    """What the trackers of this process heard in a run, and what it had of them."""
    from accelerate_cpp import Accelerator

    told = wandb_double()
    mine, everywhere = make("mine"), make("everywhere", everywhere=True)
    accelerator = Accelerator(cpu=True, log_with=["wandb", mine, everywhere])
    accelerator.init_trackers("project", {"lr": 1}, {"wandb": {"group": "a"}})
    accelerator.log({"loss": accelerator.process_index}, step=3, log_kwargs={"mine": {"k": 1}})
    accelerator.get_tracker("wandb").log_images({"samples": []}, step=1)
    accelerator.get_tracker("wandb", unwrap=True).summary["best"] = 1
    accelerator.get_tracker("mine", unwrap=True).append("by hand")
    names = [tracker.name for tracker in accelerator.trackers]
    try:
        accelerator.get_tracker("nope")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    asked = [str(item) for item in accelerator.log_with if isinstance(item, str) or not hasattr(item, "told")]
    accelerator.end_training()
    return {
        "wandb": told,
        "mine": mine.told,
        "everywhere": everywhere.told,
        "trackers": names,
        "log_with": asked,
        "refusal": refusal,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of :func:`logged` on both ranks."""
    return run_processes(logged, 2)


def test_the_main_process_logs(ranks: list[dict[str, Any]]) -> None:
    main = ranks[0]
    assert main["wandb"][:2] == ["init {'project': 'project', 'group': 'a'}", "log {'loss': 0} 3"]
    assert main["wandb"][-1] == "finish"
    assert main["mine"] == ["start", "store {'lr': 1}", "log {'loss': 0} 3 {'k': 1}", "by hand", "finish"]
    assert main["trackers"] == ["wandb", "mine", "everywhere"]


def test_other_processes_call_everything_and_log_nothing(ranks: list[dict[str, Any]]) -> None:
    assert (ranks[1]["wandb"], ranks[1]["mine"]) == ([], [])


def test_a_tracker_that_says_so_is_on_every_process(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["trackers"] == ["everywhere"]
    assert [rank["everywhere"] for rank in ranks] == [
        ["start", "store {'lr': 1}", f"log {{'loss': {rank}}} 3 {{}}", "finish"] for rank in range(2)
    ]


def test_every_process_knows_what_was_asked_for_and_refuses_unknown_names(ranks: list[dict[str, Any]]) -> None:
    assert [rank["log_with"] for rank in ranks] == [["wandb"]] * 2
    assert all("get_tracker('nope')" in rank["refusal"] for rank in ranks)


def only_the_main_process_calls() -> list[str]:
    """Scripts may start trackers and log on the main process alone: nothing communicates."""
    from accelerate_cpp import Accelerator

    mine = make("mine")
    accelerator = Accelerator(cpu=True, log_with=mine)
    if accelerator.is_main_process:
        accelerator.init_trackers("project")
        accelerator.log({"loss": 1}, step=1)
    for tracker in accelerator.trackers:
        tracker.log({"loss": 2}, step=2)
    accelerator.get_tracker("mine").log({"loss": 3}, step=3)
    accelerator.end_training()
    return list(mine.told)


def test_a_script_may_log_on_the_main_process_alone() -> None:
    logs = [f"log {{'loss': {number}}} {number} {{}}" for number in (1, 2, 3)]
    assert run_processes(only_the_main_process_calls, 2) == [["start", *logs, "finish"], []]


def a_tracker_fails() -> None:
    """The main process's tracker cannot start; the other process waits for it at the end."""
    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True, log_with=make("mine", fails=True))
    accelerator.init_trackers("project")
    accelerator.end_training()


def test_a_tracker_that_fails_ends_the_run_on_all_processes() -> None:
    main, other = start_processes(a_tracker_fails, 2)
    assert main.exit_code != 0
    assert "RuntimeError: no disk to log to" in main.stderr
    assert other.exit_code != 0
    assert "PeerLost" in other.stderr


def test_the_example_logs_once_from_two_processes(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    launch = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    example = [REPOSITORY / "examples/by_feature/tracking.py", "--project_dir", tmp_path, "--num_epochs", "2"]
    done = subprocess.run([*launch, *map(str, example)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("epoch 2: accuracy") == 1

    events = accumulator.EventAccumulator(str(tmp_path / "tracking"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in losses] == [10, 20, 30, 40, 50, 60]
    assert losses[-1][1] < losses[0][1]
    assert [event.value for event in events.Scalars("epoch")] == [1.0, 2.0]
    assert events.Tags()["histograms"] == ["bias"]
    assert len(list((tmp_path / "tracking").glob("events*"))) == 1

    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[:3] == [["", "lr", "0.01"], ["", "batch_size", "32"], ["", "seed", "0"]]
    logged_too = [(int(step), float(value)) for step, name, value in rows if name == "train/loss"]
    assert logged_too == losses
