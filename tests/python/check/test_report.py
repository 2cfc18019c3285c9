"""The report as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelerate_cpp.check.journal import Finding
from accelerate_cpp.check.report import as_text, write_json
from accelerate_cpp.check.task import Task
from accelerate_cpp.errors import SystemFailure

FINDINGS = [Finding("error", "weights-differ", "they differ", "train.py:3", "do not", (1,))]


def test_the_text_has_every_part_of_a_finding() -> None:
    assert as_text(Task("train.py", processes=2, configured=8), FINDINGS).splitlines() == [
        "accelerate-cpp check: train.py, 2 optimizer steps on the CPU, 2 processes instead of 8 "
        "(--num_processes 8 checks with all)",
        "",
        "error: train.py:3: weights-differ (rank 1)",
        "  they differ",
        "  → do not",
        "",
        "1 error, 0 warnings, 0 notes",
    ]


def test_the_file_has_them_for_programs(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", Task("train.py", processes=2, configured=8), FINDINGS, 1)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["exit_status"], report["processes"], report["configured_processes"]) == (1, 2, 8)
    assert report["findings"] == [FINDINGS[0].as_data()]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure, match="cannot write the report"):
        (tmp_path / "r.json").mkdir()
        write_json(tmp_path / "r.json", Task("train.py"), [], 0)
