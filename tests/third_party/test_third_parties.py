"""Libraries that use Accelerate run on this package, through the alias, on two processes of our launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE_SECONDS = 250.0


def _run(folder: Path, script: str, *arguments: str, num_processes: int = 2) -> list[list[str]]:
    """The words of each line that the processes print at the end."""
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--alias", "--cpu"]
    command += ["--num_processes", str(num_processes), str(SCRIPTS / script), *arguments]
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(SCRIPTS)}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return sorted(line.split() for line in result.stdout.splitlines() if "accelerate_cpp" + os.sep in line)


def _numbers(words: list[str]) -> list[float]:
    return [float(word) for word in words]


@pytest.fixture
def transformers() -> None:
    pytest.importorskip("transformers")


@pytest.mark.usefixtures("transformers")
@pytest.mark.long
def test_trainer_trains_and_resumes(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    undisturbed = _run(whole, "train_with_transformers.py", "8")
    assert [line[:2] + line[3:4] for line in undisturbed] == [["0", "2", "8"], ["1", "2", "8"]]
    assert undisturbed[0][4:] == undisturbed[1][4:]
    first, last = map(float, undisturbed[0][4:6])
    assert last < 0.7 * first
    _run(parts, "train_with_transformers.py", "4")
    resumed = _run(parts, "train_with_transformers.py", "8", "resume")
    assert [line[5:] for line in resumed] == [line[5:] for line in undisturbed]


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("stage", ["", "2"], ids=["FSDP", "ZeRO"])
@pytest.mark.parametrize("layout", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.long
def test_trainer_shards_models_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, stage: str
) -> None:
    if stage:
        monkeypatch.setenv("FSDP_ZERO_STAGE", stage)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    undisturbed = _run(whole, "train_with_transformers.py", "8")
    _run(parts, "train_with_transformers.py", "4", layout)
    sharded = _run(parts, "train_with_transformers.py", "8", "resume", layout)
    for own, expected in zip(sharded, undisturbed, strict=True):
        assert _numbers(own[5:7]) == pytest.approx(_numbers(expected[5:7]), rel=1e-5)
    assert float(sharded[0][7]) == pytest.approx(float(undisturbed[0][7]), rel=1e-5)  # which rank 0 alone has


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(("backend", "num_processes"), [("optuna", 1), ("optuna", 2), ("ray", 1)])
@pytest.mark.long
def test_trainer_searches_for_hyper_parameters(tmp_path: Path, backend: str, num_processes: int) -> None:
    pytest.importorskip(backend)
    lines = _run(tmp_path, "search_with_transformers.py", backend, num_processes=num_processes)
    assert [line[1:] for line in lines] == [[str(num_processes), "0.01"]]


@pytest.mark.usefixtures("transformers")
@pytest.mark.long
def test_adapters_of_peft_train_and_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lines = _run(tmp_path, "train_with_peft.py")
    assert [(*line[:2], line[5]) for line in lines] == [("0", "2", "True"), ("1", "2", "True")]
    assert lines[0][3:5] == lines[1][3:5]
    first, last = map(float, lines[0][3:5])
    assert last < 0.95 * first  # some .91; it falls from step to step


@pytest.mark.long
@pytest.mark.usefixtures("transformers")
def test_supervised_fine_tuning_of_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    lines = _run(tmp_path, "train_with_trl.py")
    assert [line[:2] for line in lines] == [["0", "2"], ["1", "2"]]
    first, last = map(float, lines[0][3:5])
    assert last < 0.7 * first
    for stage in (None, "1", "2", "3"):
        if stage is not None:
            monkeypatch.setenv("FSDP_ZERO_STAGE", stage)
        sharded = _run(tmp_path, "train_with_trl.py", "sharded")
        assert _numbers(sharded[0][3:5]) == pytest.approx([first, last], rel=1e-5)
        assert [line[5:] for line in sharded] == [["gathered" if stage is None else f"ZeRO-{stage}"]] * 2
