"""``accelerate-cpp merge-weights``: merges the weights of a sharded checkpoint into one file."""

from __future__ import annotations

import argparse

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser

__getattr__ = lending("commands.merge")


def merge_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = "Write the weights of a sharded checkpoint into one file."
    parser = command_parser(subparsers, "merge-weights", description)
    parser.add_argument("checkpoint_directory", help="folder of the sharded checkpoint, with its file .metadata")
    parser.add_argument("output_path", help="folder for model.safetensors")
    parser.add_argument("--unsafe_serialization", action="store_true", help="write pytorch_model.bin instead")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="remove the sharded checkpoint afterwards")
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> int:
    """Merges the checkpoint that ``args`` names."""
    from accelerate_cpp.utils.fsdp_utils import merge_fsdp_weights  # imported here, because it loads torch

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    print(f"accelerate-cpp merge-weights: wrote the weights of {args.checkpoint_directory} to {args.output_path}")
    return 0
