"""The digits: what the four lines change, and that one and two processes train the same network."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes"]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *command: str | Path) -> tuple[Path, list[str], dict[str, Any]]:
    metrics = folder / "metrics.json"
    output = run(*command, "--metrics", metrics)
    return metrics, output.splitlines(), json.loads(metrics.read_text())


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, Any]]:
    return train(tmp_path_factory.mktemp("two"), *LAUNCH, "2", EXAMPLES / "digits.py")


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, Any]]:
    return train(tmp_path_factory.mktemp("one"), *LAUNCH, "1", EXAMPLES / "digits.py")


@pytest.fixture(scope="module")
def in_plain_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, Any]]:
    return train(tmp_path_factory.mktemp("plain"), sys.executable, EXAMPLES / "digits_plain.py")


def changed_lines(sign: str) -> list[str]:
    plain, ours = ((EXAMPLES / name).read_text().splitlines() for name in ("digits_plain.py", "digits.py"))
    code = [line[1:].split("  #")[0].strip() for line in difflib.ndiff(plain, ours) if line.startswith(f"{sign} ")]
    return [line for line in code if line and not line.startswith('"""')]


def test_the_example_differs_from_plain_torch_by_the_known_lines_alone() -> None:
    the_four = [
        "from accelerate_cpp import Accelerator, DataLoaderConfiguration",
        "accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
        "model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(",
        "model, optimizer, train_loader, test_loader, scheduler",
        ")",
        "accelerator.backward(loss)",
    ]
    for_several_processes = [
        'for images, labels in tqdm(train_loader, f"epoch {epoch}", disable=not accelerator.is_local_main_process):',
        "logits, labels = accelerator.gather_for_metrics((model(images), labels))",
        "accelerator.print(f\"epoch {epoch}: loss {history[-1]['loss']:.4f}, accuracy {history[-1]['accuracy']:.4f}\")",
        "if args.metrics and accelerator.is_main_process:",
    ]
    assert sorted(changed_lines("+")) == sorted(the_four + for_several_processes)
    assert len(changed_lines("-")) == 1 + len(for_several_processes)


def test_two_processes_learn_the_digits(on_two: tuple[Path, list[str], dict[str, Any]]) -> None:
    _, lines, result = on_two
    assert result["processes"] == 2
    assert result["epochs"][-1]["accuracy"] >= 0.97
    assert sum(line.startswith("epoch 1:") for line in lines) == 1, "each line is printed by one process"


@pytest.mark.long
def test_two_processes_and_one_give_the_same_losses(
    on_two: tuple[Path, list[str], dict[str, Any]], on_one: tuple[Path, list[str], dict[str, Any]]
) -> None:
    two, one = ([row["loss"] for row in run[2]["epochs"]] for run in (on_two, on_one))
    assert on_one[2]["processes"] == 1
    # 22 steps an epoch: the first two epochs are 44 steps; later, differences in rounding have grown.
    assert two[:2] == pytest.approx(one[:2], rel=1e-5)
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.long
def test_one_process_and_plain_torch_train_alike(
    on_one: tuple[Path, list[str], dict[str, Any]], in_plain_torch: tuple[Path, list[str], dict[str, Any]]
) -> None:
    assert in_plain_torch[2]["epochs"][-1]["accuracy"] >= 0.97
    assert on_one[2]["epochs"][-1]["accuracy"] == pytest.approx(in_plain_torch[2]["epochs"][-1]["accuracy"], abs=0.02)


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """show_digits.py as a module, which writes into a temporary folder."""
    specification = importlib.util.spec_from_file_location("show_digits", EXAMPLES / "show_digits.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def test_the_three_runs_of_the_demo_have_the_same_script_and_name_their_threads(show: Any, tmp_path: Path) -> None:
    runs = show.contestants(2, 1)
    assert list(runs) == [
        "accelerate-cpp, 1 process × 1 thread",
        "accelerate-cpp, 2 processes × 1 thread",
        "accelerate 1.15.0, 2 processes × 1 thread",
    ]
    alone, ours, original = (Path(command[-1]).read_text().splitlines() for command in runs.values())
    assert alone == ours
    changed = [(old, new) for old, new in zip(ours, original, strict=True) if old != new]
    assert changed == [
        (
            "from accelerate_cpp import Accelerator, DataLoaderConfiguration",
            "from accelerate import Accelerator, DataLoaderConfiguration",
        )
    ]


def test_the_demo_without_the_original_shows_the_other_two_and_says_so(
    show: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert len(show.contestants(2, 1)) == 2
    assert "Hugging Face Accelerate is not installed" in capsys.readouterr().out


@pytest.mark.long
def test_the_original_trains_the_same_network_in_the_demo(
    show: Any, on_two: tuple[Path, list[str], dict[str, Any]], tmp_path: Path
) -> None:
    names, (*_, original) = zip(*show.contestants(2, 1).items(), strict=True)
    runs = [show.train(original, 1), on_two[2]]
    theirs, our_own = ([row["loss"] for row in run["epochs"]] for run in runs)
    assert [run["processes"] for run in runs] == [2, 2]
    assert theirs == pytest.approx(our_own, rel=1e-3)
    results = {names[1]: [on_two[2]], names[2]: [runs[0]]}
    heading, *rows = show.table(results).splitlines()
    assert heading.split() == ["step", "test", "loss", "accuracy"]
    assert [row[: len(name)] for row, name in zip(rows, results, strict=True)] == list(results)
    assert rows[0].endswith(f"{on_two[2]['epochs'][-1]['accuracy']:.4f}")
    show.plot(results, tmp_path / "digits.png")
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("failures", "is_the_original"), [(2, True), (3, True), (1, False)])
def test_only_the_original_is_run_again_and_not_for_ever(
    show: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: int, is_the_original: bool
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        f"import pathlib, sys\nruns = pathlib.Path({str(tmp_path / 'runs')!r})\nruns.open('a').write('x')\n"
        f"if len(runs.read_text()) <= {failures}: sys.exit(6)\n"
        "pathlib.Path(sys.argv[-1]).write_text('{\"threads\": 1}')\n"
    )
    command = [sys.executable, str(script), *([show.TORCHRUN] if is_the_original else [])]
    if is_the_original and failures < 3:
        assert show.train(command, 1) == {"threads": 1}
    else:
        with pytest.raises(SystemExit, match="failed with status 6"):
            show.train(command, 1)
    assert len((tmp_path / "runs").read_text()) == (min(failures + 1, 3) if is_the_original else 1)
    assert capsys.readouterr().out.count("is run again") == (2 if is_the_original else 0)


def test_the_time_of_a_step_is_the_median_over_the_epochs_of_all_runs(show: Any) -> None:
    runs = [{"epochs": [{"seconds": seconds, "steps": 10}]} for seconds in (0.1, 0.5, 0.2)]
    assert show.step_milliseconds(runs) == pytest.approx(20.0)
