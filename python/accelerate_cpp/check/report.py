"""The report of a check, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from accelerate_cpp.check.journal import LEVELS, Finding
from accelerate_cpp.check.task import Task
from accelerate_cpp.config.file import replace_text
from accelerate_cpp.errors import SystemFailure

_WIDTH = 110


def as_text(task: Task, findings: Sequence[Finding]) -> str:
    """For the terminal."""
    lines = [f"accelerate-cpp check: {task.script}, {task.steps} optimizer steps on the CPU, {_processes(task)}"]
    for finding in findings:
        ranks = f" (rank {', '.join(map(str, finding.ranks))})" if 0 < len(finding.ranks) < task.processes else ""
        lines.append(f"\n{finding.level}: {finding.where + ': ' if finding.where else ''}{finding.code}{ranks}")
        lines += _wrapped(finding.what, "  ")
        if finding.advice:
            lines += _wrapped(f"→ {finding.advice}", "  ")
    counts = [f"{number} {level}{'' if number == 1 else 's'}" for level, number in _counts(findings).items()]
    return "\n".join([*lines, "", ", ".join(counts)])


def write_json(path: Path, task: Task, findings: Sequence[Finding], status: int) -> None:
    """For programs.

    Raises:
        SystemFailure: the file cannot be written.
    """
    report = {
        "script": task.script,
        "steps": task.steps,
        "processes": task.processes,
        "configured_processes": task.configured,
        "exit_status": status,
        "findings": [finding.as_data() for finding in findings],
    }
    try:
        replace_text(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise SystemFailure(error.errno, f"cannot write the report: {error.strerror}", str(path)) from None


def _processes(task: Task) -> str:
    shown = f"{task.processes} process{'es' if task.processes > 1 else ''}"
    if task.configured == task.processes:
        return shown
    return f"{shown} instead of {task.configured} (--num_processes {task.configured} checks with all)"


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {level: sum(finding.level == level for finding in findings) for level in LEVELS}


def _wrapped(text: str, indent: str) -> list[str]:
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH - len(indent)) or [""]]
    return [indent + line for line in lines]
