"""``accelerate-cpp config``: creates, completes and explains the configuration file of launches."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.commands import config_args, prompt
from accelerate_cpp.commands.config_args import load_config_from_file as load_config_from_file
from accelerate_cpp.commands.launch import add_setting_flags, launch_options, run_command
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser
from accelerate_cpp.config import answers as answers_of
from accelerate_cpp.config import file as config_file
from accelerate_cpp.config.questions import QUESTIONS, Machine
from accelerate_cpp.devices.cores import read_places
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.launch_plan import resolve_group

# In the original, commands.config is a folder with config_args in it, and is imported from as such.
__path__: list[str] = []
sys.modules[f"{__name__}.config_args"] = config_args

_PRECISIONS = ("no", "fp16", "bf16")
# Keys without a question that are in every file, with their defaults.
_ALWAYS_WRITTEN = {name for name, key in config_file.KEYS.items() if key.default is not None}


def __getattr__(name: str) -> Any:
    """``default_config_file``: the path of the file that launches read by default."""
    if name == "default_config_file":
        return config_args.default_config_file
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_config_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command and its own sub-commands, by itself or as one of ``subparsers``."""
    description = "Create (with questions or defaults), complete or explain the configuration file of launches."
    usage = "%(prog)s [--config_file PATH] [--answers FILE] [<what>]"
    parser = command_parser(subparsers, "config", description, usage)
    parser.add_argument(
        "--config_file", metavar="PATH", help="the file to write; default: the one in Hugging Face's cache"
    )
    keys = ", ".join(question.key for question in QUESTIONS)
    parser.add_argument(
        "--answers",
        metavar="FILE",
        help=f"ask no questions: YAML or JSON with answers; missing ones get their defaults; keys: {keys}",
    )
    parser.set_defaults(func=_ask)
    # Without one of them, questions are asked. Their flags have no defaults, which would hide the values of those
    # above.
    commands = parser.add_subparsers(prog=parser.prog, metavar="<what>", dest="what")
    default = commands.add_parser("default", help="write a file that fits this machine, unless one exists")
    default.add_argument(
        "--mixed_precision", type=str, choices=_PRECISIONS, default="no", help="precision of the forward pass"
    )
    default.set_defaults(func=_default)
    update = commands.add_parser("update", help="add the keys that a file lacks, with their defaults")
    update.set_defaults(func=_update)
    for command in (default, update):
        place = "default: the one in Hugging Face's cache"
        command.add_argument("--config_file", metavar="PATH", default=argparse.SUPPRESS, help=f"which file; {place}")
    explain = commands.add_parser("explain", help="show each setting of a launch with these flags, and its source")
    add_setting_flags(explain)
    explain.set_defaults(func=_explain)
    next(action for action in explain._actions if action.dest == "config_file").default = argparse.SUPPRESS
    return parser


def default_values(mixed_precision: str, cpu_processes: int = 1) -> dict[str, Any]:
    """A configuration that uses all GPUs of this machine; without one, its CPU with ``cpu_processes``."""
    gpus = host_resources.gpu_count()
    processes = gpus or cpu_processes
    values = {name: key.default for name, key in config_file.KEYS.items()}
    return values | {
        "distributed_type": "NO" if processes == 1 else "MULTI_GPU" if gpus else "MULTI_CPU",
        "mixed_precision": mixed_precision,
        "num_processes": processes,
        "use_cpu": gpus == 0,
    }


def _processes_for_cores() -> int:
    """One for each NUMA node, and two where one node has several cores; a launch divides the cores among them."""
    cores = host_resources.usable_cores()
    nodes = {place.node for place in read_places(os.sched_getaffinity(0)).values()} if sys.platform == "linux" else ()
    return min(cores, max(2, len(nodes)))


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Writes a configuration file that fits this machine: one process for each GPU, or one on the CPU, as the original.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: the file, in YAML, or in JSON if its suffix says so; ``None`` for the one that launches read by
            default.

    Returns:
        Its path, or ``False`` if the file already exists; it is then not changed.

    Raises:
        InvalidArgument: another precision.
    """
    precision = mixed_precision.lower()
    if precision not in _PRECISIONS:
        raise InvalidArgument(f"mixed_precision={mixed_precision!r}: expected one of {', '.join(_PRECISIONS)}")
    path = config_file.path_of(save_location)
    return path if _is_written(path, default_values(precision)) else False


def _is_written(path: Path, values: Mapping[str, Any]) -> bool:
    """Writes ``values`` unless there is a file."""
    if path.exists():
        print(f"{path} already exists and was not changed; remove it, or change it with `accelerate-cpp config update`")
        return False
    config_file.save(path, values)
    return True


def _ask(args: argparse.Namespace) -> int:
    path = config_file.path_of(args.config_file)
    machine = Machine(gpus=host_resources.gpu_count())
    before = config_file.load(path).given if path.exists() else {}
    if args.answers is not None:
        answers = answers_of.answers_of_file(Path(args.answers).expanduser(), machine)
    else:
        answers = _asked(path, machine, before)
    try:
        config_file.save(path, answers_of.file_values(answers, before))
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be written ({error}); name another file with --config_file") from error
    kept = sorted(answers_of.kept(answers, before).keys() - _ALWAYS_WRITTEN)
    if kept:
        print(f"accelerate-cpp config: kept from the existing file: {', '.join(kept)}")
    print(f"accelerate-cpp config: wrote {path}")
    return 0


def _asked(path: Path, machine: Machine, before: Mapping[str, Any]) -> dict[str, Any]:
    if not_asked := answers_of.not_asked():
        print(f"There are no questions about features that accelerate_cpp does not support yet: {not_asked}.")
    print(f"Enter accepts the suggestion, Ctrl-C quits; {path} is written after the last question.")
    try:
        return answers_of.answered(prompt.ask, machine, before)
    except EOFError as error:
        raise InvalidArgument(
            f"config: {error} before all questions were answered, so nothing was written; answer all of them, or pass "
            "--answers FILE"
        ) from None
    except KeyboardInterrupt:
        print("\naccelerate-cpp config: nothing was written", file=sys.stderr)
        raise


def _refuse_answers(args: argparse.Namespace) -> None:
    if args.answers is not None:
        raise InvalidArgument(
            f"config: --answers replaces the questions, but `config {args.what}` does not ask any; leave it out"
        )


def _default(args: argparse.Namespace) -> int:
    _refuse_answers(args)
    path, values = config_file.path_of(args.config_file), default_values(args.mixed_precision, _processes_for_cores())
    if _is_written(path, values):
        count, cores = values["num_processes"], host_resources.usable_cores()
        on = f"on the CPU with its {cores} core{'s' * (cores > 1)}" if values["use_cpu"] else "one for each GPU"
        print(f"accelerate-cpp config: wrote {path}: {count} process{'es' * (count > 1)}, {on}")
    return 0


def _update(args: argparse.Namespace) -> int:
    _refuse_answers(args)
    path = config_file.path_of(args.config_file)
    config_file.save(path, config_file.load(path).values)
    print(f"accelerate-cpp config: completed {path}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    _refuse_answers(args)
    _, settings = resolve_group(launch_options(args, training_script=""))
    rows = [
        (name, "not set" if setting.value is None else str(setting.value), setting.source)
        for name, setting in settings.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")
    return 0


def main() -> int:
    """Entry point of ``python -m accelerate_cpp.commands.config``."""
    return run_command(get_config_parser())


if __name__ == "__main__":
    sys.exit(main())
