"""``accelerate-cpp tpu-config``: runs commands on all machines of a TPU pod, to set them up."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from accelerate_cpp.commands.launch import run_command
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser
from accelerate_cpp.config import file as config_file
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.workers.over_gcloud import on_all_machines, require_gcloud

_FOLDER = "/usr/share"  # where the original also runs the commands
_PACKAGE = "accelerate-cpp"
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*[0-9A-Za-z.+-]*")


def tpu_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as one of ``subparsers``."""
    description = "Run commands on all machines of a TPU pod, to set them up for training."
    parser = command_parser(subparsers, "tpu-config", description)
    pod = parser.add_argument_group(
        "Config Arguments", "Values of the configuration file, unless these flags are given."
    )
    pod.add_argument(
        "--config_file", type=str, metavar="PATH", help="configuration file; default: the one in Hugging Face's cache"
    )
    pod.add_argument("--tpu_name", metavar="NAME", help="name of the pod")
    pod.add_argument("--tpu_zone", metavar="ZONE", help="zone of the pod")
    section = parser.add_argument_group("TPU Arguments", "What to run, and how.")
    section.add_argument("--use_alpha", action="store_true", help="use gcloud alpha instead of gcloud")
    section.add_argument("--command_file", metavar="PATH", help="shell script with the commands")
    section.add_argument(
        "--command", action="append", nargs="+", metavar="COMMAND", help="a command in quotes; may be repeated"
    )
    section.add_argument(
        "--install_accelerate",
        action="store_true",
        help="first install this package, which the machines have to compile for their torch",
    )
    section.add_argument(
        "--accelerate_version", default="latest", metavar="VERSION", help="its version: a number or latest"
    )
    section.add_argument("--debug", action="store_true", help="print the gcloud command instead of running it")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> int:
    """Runs, or prints, the commands of ``args``; the exit status is that of gcloud."""
    command = gcloud_command(args)
    if args.debug:
        print(f"Running {shlex.join(command)}")
        return 0
    require_gcloud("tpu-config")
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        print("accelerate-cpp tpu-config: the pod is set up")
        return 0
    print(f"accelerate-cpp tpu-config: gcloud failed with exit status {status}", file=sys.stderr)
    return status if status > 0 else 128 - status


def gcloud_command(args: argparse.Namespace) -> list[str]:
    """The command that runs the commands of ``args``, or of the configuration file, on all machines of the pod.

    Raises:
        InvalidArgument: the name or the zone of the pod, or the command, is missing or given twice.
    """
    file = config_file.find(args.config_file)
    values = {} if file is None else file.values
    name, zone = (getattr(args, key) or values.get(key) for key in ("tpu_name", "tpu_zone"))
    for key, value in (("tpu_name", name), ("tpu_zone", zone)):
        if not value:
            raise InvalidArgument(f"tpu-config: {key} is unknown: pass --{key}, or write it into the file")
    if args.command_file and args.command:
        raise InvalidArgument("tpu-config: --command_file and --command exclude each other: pass one of them")
    said_by_flag = args.command_file or args.command
    script = args.command_file if said_by_flag else values.get("command_file")
    lines = [text for words in args.command or () for text in words] if said_by_flag else values.get("commands") or []
    if not script and not lines:
        raise InvalidArgument("tpu-config: there is nothing to run: pass --command or --command_file")
    # A script is kept line by line: its comments and loops would not work in one line.
    first = [
        f"cd {_FOLDER}",
        *([f"pip install {_package(args.accelerate_version)}"] if args.install_accelerate else []),
    ]
    text = "\n".join([*first, _content(script)]) if script else "; ".join([*first, *map(str, lines)])
    return on_all_machines(str(name), str(zone), text, args.use_alpha)


def _package(version: str) -> str:
    if version == "latest":
        return f"{_PACKAGE} -U"
    if not _VERSION.fullmatch(version):
        raise InvalidArgument(f"--accelerate_version {version!r}: expected a version such as 0.1.0, or latest")
    return f"{_PACKAGE}=={version}"


def _content(script: str) -> str:
    path = Path(script).expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"tpu-config: the script {path} cannot be read ({error})") from error
    if not text:
        raise InvalidArgument(f"tpu-config: the script {path} is empty: there is nothing to run")
    return text


def main() -> int:
    """Entry point of ``python -m accelerate_cpp.commands.tpu``."""
    return run_command(tpu_command_parser())


if __name__ == "__main__":
    sys.exit(main())
