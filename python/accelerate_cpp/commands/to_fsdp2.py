"""``accelerate-cpp to-fsdp2``: rewrites the options of FSDP 1 in a configuration file as those of FSDP 2."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser
from accelerate_cpp.config import file as files
from accelerate_cpp.errors import ExistingFile

logger = logging.getLogger(__name__)

_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
# Options for things that FSDP 2 always does, or decides by itself.
_WITHOUT_MEANING = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)


def to_fsdp2_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = "Rewrite the options of FSDP 1 in a configuration file as those of FSDP 2."
    parser = command_parser(subparsers, "to-fsdp2", description)
    parser.add_argument("--config_file", metavar="PATH", required=True, help="the file to convert")
    parser.add_argument("--overwrite", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--output_file", metavar="PATH", help="the file to write; default with --overwrite: the same file"
    )
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> int:
    """Converts the file that ``args`` names."""
    source = Path(args.config_file).expanduser()
    target = source if args.output_file is None else Path(args.output_file).expanduser()
    given = load_config(source)
    if target.exists() and not args.overwrite:
        raise ExistingFile(f"{target} is there already: pass --overwrite, or another --output_file")
    files.save(target, convert_config_to_fsdp2(given, str(source)))
    return 0


def load_config(config_file: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        MissingFile: there is none.
        Unavailable: it cannot be read.
        InvalidArgument: it has a key or a value that it may not have.
    """
    return dict(files.load(Path(config_file)).given)


def convert_config_to_fsdp2(config: Mapping[str, Any], source: str = "the configuration") -> dict[str, Any]:
    """The content of a configuration file with the options of FSDP 1 replaced by those of FSDP 2.

    Warnings are logged of what is left out, and where there is nothing to convert.

    Args:
        config: the content; it is not changed.
        source: its name in the report.
    """
    section = config.get("fsdp_config") or {}
    if not section or section.get("fsdp_version") == 2:
        found = "is for FSDP 2 already" if section else "has no fsdp_config"
        logger.warning("accelerate-cpp to-fsdp2: %s %s; nothing to convert", source, found)
        return dict(config)
    for name in section.keys() & set(_WITHOUT_MEANING):
        logger.warning("accelerate-cpp to-fsdp2: %s has no meaning in FSDP 2 and is left out", name)
    return {**config, "fsdp_config": converted_section(section)}


def converted_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The ``fsdp_config`` of FSDP 2 that is equivalent to ``section`` of FSDP 1. Unknown keys are kept."""
    converted: dict[str, Any] = {"fsdp_version": 2}
    for name, value in section.items():
        if name in _WITHOUT_MEANING or name == "fsdp_version":
            continue
        if name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            converted["fsdp_reshard_after_forward"] = _RESHARDS.get(str(value), value)
        else:
            converted[name] = value
    return converted
