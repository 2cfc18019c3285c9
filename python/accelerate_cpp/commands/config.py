"""``accelerate-cpp config``: writes, completes and explains the configuration file of launches."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from accelerate_cpp.commands.launch import add_setting_flags, launch_options
from accelerate_cpp.commands.utils import CustomArgumentParser
from accelerate_cpp.config import file as config_file
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import host
from accelerate_cpp.launch.plan import resolve_group

_PRECISIONS = ("no", "fp16", "bf16")


def config_command_parser(subparsers: argparse._SubParsersAction[CustomArgumentParser]) -> CustomArgumentParser:
    """The parser of the command and its own sub-commands, as one of ``subparsers``."""
    description = "Write, complete or explain the configuration file of launches."
    parser = subparsers.add_parser("config", description=description, help=description)
    commands = parser.add_subparsers(prog=parser.prog, metavar="<what>", dest="what", required=True)
    default = commands.add_parser("default", help="write a file that fits this machine, unless there is one")
    default.add_argument("--config_file", metavar="PATH", help="where; default: Hugging Face's cache")
    default.add_argument("--mixed_precision", choices=_PRECISIONS, default="no", help="precision of the forward pass")
    default.set_defaults(func=_default)
    update = commands.add_parser("update", help="complete a file by the defaults of the keys that it lacks")
    update.add_argument("--config_file", metavar="PATH", help="which; default: the one in Hugging Face's cache")
    update.set_defaults(func=_update)
    explain = commands.add_parser("explain", help="show each setting of a launch with these flags, and who says so")
    add_setting_flags(explain)
    explain.set_defaults(func=_explain)
    return parser


def default_values(mixed_precision: str) -> dict[str, Any]:
    """A configuration that uses all GPUs of this machine, or its CPU."""
    gpus = host.gpu_count()
    values = {name: key.default for name, key in config_file.KEYS.items()}
    return values | {
        "distributed_type": "MULTI_GPU" if gpus > 1 else "NO",
        "mixed_precision": mixed_precision,
        "num_processes": max(1, gpus),
        "use_cpu": gpus == 0,
    }


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Writes a configuration file that fits this machine.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: the file; ``None`` for the place where launches look.

    Returns:
        Its path, or ``False`` where there is a file already, which stays as it is.

    Raises:
        InvalidArgument: another precision.
    """
    precision = mixed_precision.lower()
    if precision not in _PRECISIONS:
        raise InvalidArgument(f"mixed_precision={mixed_precision!r}: expected one of {', '.join(_PRECISIONS)}")
    path = config_file.path_of(save_location)
    if path.exists():
        print(f"{path} is there already and stays as it is; remove it, or change it by `accelerate-cpp config update`")
        return False
    kept = {name: value for name, value in default_values(precision).items() if value is not None}
    # JSON whatever the suffix, as the original writes it: every reader of YAML reads it, too.
    config_file.replace_text(path, json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return path


def _default(args: argparse.Namespace) -> int:
    path = write_basic_config(args.mixed_precision, args.config_file)
    if path:
        print(f"accelerate-cpp config: wrote {path}")
    return 0


def _update(args: argparse.Namespace) -> int:
    path = config_file.path_of(args.config_file)
    config_file.save(path, config_file.load(path).values)
    print(f"accelerate-cpp config: completed {path}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    _, settings = resolve_group(launch_options(args, training_script=""))
    rows = [
        (name, "not set" if setting.value is None else str(setting.value), setting.source)
        for name, setting in settings.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")
    return 0
