"""The digits: what the four lines change, and that one and two processes train the same network."""

from __future__ import annotations

import difflib
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


@pytest.mark.long
def test_the_result_is_shown_as_table_picture_times_and_accuracy(
    tmp_path: Path, on_two: tuple[Path, list[str], dict[str, Any]], on_one: tuple[Path, list[str], dict[str, Any]]
) -> None:
    picture = tmp_path / "digits.png"
    show = EXAMPLES / "show_digits.py"
    lines = run(sys.executable, show, on_two[0], "--beside", on_one[0], "--plot", picture).splitlines()
    assert lines[0].split() == ["epoch", "loss", "accuracy", "samples/s"]
    assert [line.split()[0] for line in lines[1:16]] == [str(epoch) for epoch in range(1, 16)]
    assert any(line.startswith("2 processes:") for line in lines)
    assert any(line.startswith("1 process:") for line in lines)
    assert lines[-1] == f"test accuracy: {on_two[2]['epochs'][-1]['accuracy']:.3f}"
    assert picture.read_bytes().startswith(b"\x89PNG")
