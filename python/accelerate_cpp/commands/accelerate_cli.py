"""``accelerate-cpp``: the command with its sub-commands, of which only the requested one is loaded."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module

from accelerate_cpp import __version__
from accelerate_cpp.commands.utils import CustomArgumentParser

NO_COMMAND = 1  # the exit status where nothing was asked, as of the original

# The sub-command, its module, the function that creates its parser, and its line in --help.
COMMANDS = (
    ("check", "check", "check_command_parser", "dry-run a script, and report what would go wrong in a long run"),
    (
        "config",
        "config",
        "get_config_parser",
        "create (with questions or defaults), complete or explain the configuration file of launches",
    ),
    ("env", "env", "env_command_parser", "show versions, hardware and configuration, for bug reports"),
    (
        "estimate-memory",
        "estimate",
        "estimate_command_parser",
        "show how much memory a model needs, without loading it",
    ),
    ("launch", "launch", "launch_command_parser", "start a training script on one or several processes"),
    ("merge-weights", "merge", "merge_command_parser", "write the weights of a sharded checkpoint into one file"),
    ("rebuild", "rebuild", "rebuild_command_parser", "build the C++ module for the torch that is installed"),
    ("test", "test", "test_command_parser", "test communication, data and training with a configuration"),
    ("to-fsdp2", "to_fsdp2", "to_fsdp2_command_parser", "rewrite the options of FSDP 1 in a file as those of FSDP 2"),
    ("tpu-config", "tpu", "tpu_command_parser", "run commands on all machines of a TPU pod, to set them up"),
)


def main() -> int:
    """Entry point of the ``accelerate-cpp`` command; returns its exit status."""
    parser = CustomArgumentParser("accelerate-cpp", usage="%(prog)s <command> [arguments of the command]")
    parser.add_argument("--version", action="version", version=_versions(), help="show the version, and exit")
    subparsers = parser.add_subparsers(prog=parser.prog, metavar="<command>", dest="command", required=True)
    asked = sys.argv[1] if len(sys.argv) > 1 else None
    for name, module, maker, summary in COMMANDS:
        if name == asked:
            getattr(import_module(f"accelerate_cpp.commands.{module}"), maker)(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    if asked is None:
        parser.print_help()
        return NO_COMMAND
    if asked not in {name for name, *_ in COMMANDS}:
        if not asked.startswith("-"):
            parser.error(_no_such_command(asked))
        parser.parse_args()  # shows the help or the version, or refuses the flag
        parser.error("expected the command first")
    from accelerate_cpp.commands.launch import run_command  # imported here, because --help does not need it

    return run_command(parser)


def _versions() -> str:
    """This package's version, and torch's for which it was built; without importing either."""
    try:
        from accelerate_cpp._build_info import TORCH_VERSION
    except ImportError:
        return f"accelerate-cpp {__version__} (not built)"
    return f"accelerate-cpp {__version__} (built for torch {TORCH_VERSION})"


def _no_such_command(asked: str) -> str:
    names = [name for name, *_ in COMMANDS]
    if asked.endswith(".py"):
        return f"there is no command {asked!r}; to run a script: accelerate-cpp launch {' '.join(sys.argv[1:])}"
    nearest = get_close_matches(asked, names, 1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"there is no command {asked!r}{meant} (commands: {', '.join(names)})"


if __name__ == "__main__":
    sys.exit(main())
