"""``accelerate-cpp env``: the facts about a machine that belong in a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from shutil import which

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser
from accelerate_cpp.config import file as config_file
from accelerate_cpp.installation import built_for, installed_torch, obstacle
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.shown_lines import shown

__getattr__ = lending("commands.env")

_PACKAGES = ("accelerate-cpp", "torch", "numpy", "safetensors", "transformers")


def env_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = "Show versions, hardware and configuration, for bug reports."
    parser = command_parser(subparsers, "env", description)
    parser.add_argument("--config_file", metavar="PATH", help="configuration file to show; default: the one in use")
    parser.set_defaults(func=_env)
    return parser


def _env(args: argparse.Namespace) -> int:
    for name, value in facts(args.config_file).items():
        print(f"- {name}: {value}")
    return 0


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Shows the information that ``args`` requests, and returns it, with the original's name for the command's path."""
    _env(args)
    return {**facts(args.config_file), "`accelerate` bash location": which("accelerate-cpp") or "Not found"}


def facts(path: str | None) -> dict[str, str]:
    """Versions, hardware and the configuration file, in the order in which they are shown. Does not load torch."""
    built = built_for()
    found = {name: _version(name) for name in _PACKAGES}
    in_use = config_file.path_of(path)
    shows = path is not None or in_use.is_file()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        **found,
        "C++ module": obstacle(built, installed_torch()) or f"built for torch {built}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "command": which("accelerate-cpp") or "not in PATH",
        "platform": platform.platform(),
        "cores": f"{host_resources.usable_cores()} of {os.cpu_count()}",
        "memory": f"{memory:.1f} GiB",
        "NVIDIA GPUs": str(host_resources.gpu_count()),
        "configuration file": str(in_use) if shows else f"none at {in_use}",
        **({"configuration": _content(in_use)} if shows else {}),
    }


def _content(path: Path) -> str:
    given = config_file.load(path).given
    return ", ".join(f"{name}={shown(name, value)!r}" for name, value in sorted(given.items()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
