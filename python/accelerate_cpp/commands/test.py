"""``accelerate-cpp test``: launches a script that tests whether training works on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import accelerate_cpp.test_utils.scripts as scripts
from accelerate_cpp.commands.launch import add_setting_flags, run_launch
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser


def test_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,  # noqa: PT028
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``; it takes the flags of a launch."""
    description = "Test communication, data and training with a configuration, or with flags of a launch."
    parser = command_parser(subparsers, "test", description)
    add_setting_flags(parser)
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> int:
    """Launches the test script as ``args`` describes, and returns the exit status of the launch."""
    args.training_script = str(Path(scripts.__file__).with_name("test_script.py"))
    args.training_script_args = []
    status = run_launch(args)
    if status == 0:
        print("accelerate-cpp test: everything works; train on")
    return status
