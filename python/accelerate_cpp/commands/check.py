"""``accelerate-cpp check``: a dry run of a script that reports what would go wrong in a long one."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate_cpp.check.across import judge
from accelerate_cpp.check.journal import Finding, read_journals
from accelerate_cpp.check.report import as_text, write_json
from accelerate_cpp.check.task import Task
from accelerate_cpp.commands.launch import add_script, add_setting_flags, launch_options
from accelerate_cpp.commands.utils import CustomArgumentParser, integer_from
from accelerate_cpp.installation import require_fitting_torch
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.plan.rehearsal import rehearse
from accelerate_cpp.launch.workers.executed import execute

_DESCRIPTION = (
    "Run the first steps of a script on the CPU, and report configuration conflicts, uneven tails, collectives that do "
    "not match, schedules of the wrong length, and state that is not saved. What the script saves through the "
    "Accelerator, torch.save or safetensors goes to a temporary folder."
)


def check_command_parser(subparsers: argparse._SubParsersAction[CustomArgumentParser]) -> CustomArgumentParser:
    """The parser of the command, as one of ``subparsers``; it takes the flags of a launch."""
    usage = "%(prog)s [flags] training_script [arguments of the script]"
    parser = subparsers.add_parser("check", description=_DESCRIPTION, help="dry-run a script", usage=usage)
    add_setting_flags(parser)
    section = parser.add_argument_group("Check", "The exit status is 1 when there are errors, 0 when there are none.")
    section.add_argument("--steps", type=integer_from(1), default=2, metavar="N", help="optimizer steps; default: 2")
    section.add_argument(
        "--wait",
        type=integer_from(1),
        default=60,
        metavar="S",
        help="how many seconds ranks wait for each other; default: 60",
    )
    section.add_argument(
        "--time_limit",
        type=integer_from(1),
        default=600,
        metavar="S",
        help="time limit of the whole run in seconds; default: 600",
    )
    section.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    add_script(parser, "path of the script; with -m, the module")
    parser.set_defaults(func=_check)
    return parser


def _check(args: argparse.Namespace) -> int:
    require_fitting_torch()
    rehearsal = rehearse(launch_options(args, training_script_args=tuple(args.training_script_args)))
    task = Task(
        script=args.training_script,
        arguments=tuple(args.training_script_args),
        module=args.module,
        steps=args.steps,
        wait_seconds=args.wait,
        time_limit_seconds=args.time_limit,
        processes=rehearsal.plan.group.num_processes,
        configured=rehearsal.configured,
        settings={name: (setting.value, setting.source) for name, setting in rehearsal.settings.items()},
    )
    with tempfile.TemporaryDirectory(prefix="accelerate-cpp-check-") as name:
        folder = Path(name)
        task.save(folder)
        command = (*module_program("accelerate_cpp.check.run"), str(folder))
        report = folder / "launch.json"
        ended = execute(replace(rehearsal.plan, command=command, report=report), quiet=True)
        attempt = json.loads(report.read_text())["attempts"][-1]
        if attempt["interrupted_by"] is not None:
            return ended
        findings = judge(task, read_journals(folder), _crash(attempt))
    crowd = rehearsal.crowd()
    if crowd:
        findings.append(Finding("warning", "too-many-processes", crowd, "", "one process for each GPU, or core"))
    status = int(any(finding.level == "error" for finding in findings))
    print(as_text(task, findings))
    if args.json is not None:
        write_json(Path(args.json), task, findings, status)
    return status


def _crash(attempt: dict[str, Any]) -> tuple[int, str] | None:
    """The rank whose process failed first, and the cause."""
    rank = attempt["first_failure"]
    return next(((rank, worker["how"]) for worker in attempt["workers"] if worker["rank"] == rank), None)
