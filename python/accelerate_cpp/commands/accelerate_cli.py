"""``accelerate-cpp``: the command with its sub-commands."""

from __future__ import annotations

import sys

from accelerate_cpp.commands.config import config_command_parser
from accelerate_cpp.commands.env import env_command_parser
from accelerate_cpp.commands.launch import launch_command_parser, run_command
from accelerate_cpp.commands.merge import merge_command_parser
from accelerate_cpp.commands.test import test_command_parser
from accelerate_cpp.commands.to_fsdp2 import to_fsdp2_command_parser
from accelerate_cpp.commands.utils import CustomArgumentParser


def main() -> int:
    """Entry point of the ``accelerate-cpp`` command; returns its exit status."""
    parser = CustomArgumentParser("accelerate-cpp", usage="%(prog)s <command> [arguments of the command]")
    subparsers = parser.add_subparsers(prog=parser.prog, metavar="<command>", dest="command", required=True)
    config_command_parser(subparsers)
    env_command_parser(subparsers)
    launch_command_parser(subparsers)
    merge_command_parser(subparsers)
    test_command_parser(subparsers)
    to_fsdp2_command_parser(subparsers)
    return run_command(parser)


if __name__ == "__main__":
    sys.exit(main())
