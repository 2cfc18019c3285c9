"""``accelerate-cpp launch``: starts a training script on one or several processes of this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.utils import CustomArgumentParser, command_parser, integer_from
from accelerate_cpp.config import file as files
from accelerate_cpp.config.env_table import ELASTIC_RULES
from accelerate_cpp.config.sharding_flags import SHARDING, ShardingFlag
from accelerate_cpp.config.unsupported_flags import GROUPS
from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.installation import require_fitting_torch
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, remarks, resolve
from accelerate_cpp.launch.plan.settings import FP8_FLAGS
from accelerate_cpp.launch.plan.tpus import Pod
from accelerate_cpp.launch.workers.executed import execute
from accelerate_cpp.launch.workers.program import open_standard_streams
from accelerate_cpp.launch.workers.worker_output import say

__getattr__ = lending("commands.launch")

_SSH = "ssh -o BatchMode=yes"
_DYNAMO_BACKENDS = (
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "aot_torchxla_trace_once",
    "torhchxla_trace_once",
    "tvm",
)


def launch_command_parser(
    subparsers: argparse._SubParsersAction[CustomArgumentParser] | None = None,
) -> CustomArgumentParser:
    """The parser of the command, by itself or as a sub-command of ``subparsers``."""
    description = "Start a training script on one or several processes of this machine."
    usage = "%(prog)s [flags] training_script [arguments of the script]"
    parser = command_parser(subparsers, "launch", description, usage)
    add_setting_flags(parser)
    _add_hostfile_flags(parser)
    _add_supervision_flags(parser)
    _add_script_flags(parser)
    _add_unsupported_flags(parser)
    parser.set_defaults(func=launch_command)
    return parser


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that describe a launch, whatever is launched."""
    at_least_one = integer_from(1)
    parser.add_argument(
        "--config_file", metavar="PATH", help="configuration file; default: the one in Hugging Face's cache, if any"
    )
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even when GPUs are present")
    parser.add_argument("--multi_gpu", action="store_true", help="train on several GPUs, one per process")
    parser.add_argument(
        "--num_processes",
        type=at_least_one,
        metavar="N",
        help="number of processes on all machines together; default: one per visible GPU, else 1 per machine",
    )
    parser.add_argument(
        "--num_cpu_threads_per_process",
        type=at_least_one,
        metavar="N",
        help="intra-operator threads of each process; default: OMP_NUM_THREADS, else a share of the usable cores",
    )
    parser.add_argument(
        "--enable_cpu_affinity",
        action="store_true",
        help="pin each process to its own cores, on the NUMA node of its GPU if it has one",
    )
    parser.add_argument("--gpu_ids", metavar="IDS", help="GPUs to use, such as 0,1; default: all")
    parser.add_argument(
        "--mixed_precision", choices=("no", "fp16", "bf16", "fp8"), help="precision of the forward pass"
    )
    parser.add_argument(
        "--gradient_accumulation_steps", type=at_least_one, metavar="N", help="micro-batches per optimizer step"
    )
    parser.add_argument("--debug", action="store_true", help="check the shapes of collectives before running them")
    _add_machine_flags(parser)
    _add_tpu_flags(parser)
    _add_compiler_flags(parser)
    _add_fp8_flags(parser)
    _add_sharding_flags(parser)


def _add_machine_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group(
        "Several machines", "Without these flags, the launcher uses the values of Slurm, MPI or Kubernetes."
    )
    parser.set_defaults(least_machines=None)
    section.add_argument(
        "--num_machines",
        action=_Machines,
        metavar="N",
        help="number of machines; default: 1, or as found; with MIN:MAX, such as 1:3, the run goes on with fewer when "
        "some are lost, and with more when they come",
    )
    section.add_argument(
        "--elastic_lr",
        choices=ELASTIC_RULES,
        default="linear",
        help="with MIN:MAX: how the learning rate follows the samples of a step, where accumulation cannot keep them",
    )
    section.add_argument("--machine_rank", type=integer_from(0), metavar="R", help="rank of this machine, from 0")
    section.add_argument("--main_process_ip", metavar="ADDRESS", help="address of the machine with rank 0")
    section.add_argument(
        "--main_process_port",
        type=integer_from(0, 65535),
        metavar="P",
        help="TCP port of rank 0; default: a free one on one machine, else 29500 or as found",
    )
    section.add_argument("--same_network", action="store_true", help="all machines are in one network; has no effect")
    section.add_argument(
        "--mpirun_hostfile", metavar="FILE", help="let mpirun start a launcher on each machine in FILE, an MPI hostfile"
    )
    section.add_argument(
        "--rdzv_backend", metavar="NAME", help="how machines connect: static (default), or c10d and others of torchrun"
    )
    section.add_argument(
        "--rdzv_conf", metavar="OPTIONS", default="", help="its options, as key=value, separated by commas"
    )
    section.add_argument("--role", metavar="NAME", default="default", help="name of the workers in such a rendezvous")


class _Machines(argparse.Action):
    """Reads a number of machines, or the least and the most of an elastic run."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        least, colon, most = str(values).partition(":")
        if not (least.isdecimal() and (most.isdecimal() or not colon)):
            parser.error(f"argument {option_string}: expected an integer of at least 1, or MIN:MAX, got {values!r}")
        numbers = int(least), int(most or least)
        if numbers[0] < 1 or numbers[1] < numbers[0] or (colon and numbers[1] < 2):
            parser.error(
                f"argument {option_string}: expected an integer of at least 1, or MIN:MAX with 1 ≤ MIN ≤ MAX and "
                f"MAX ≥ 2, got {values!r}"
            )
        namespace.num_machines = numbers[1]
        namespace.least_machines = numbers[0] if colon else None


def _add_tpu_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("TPUs", "torch_xla starts the workers, and calls a function of the script.")
    section.add_argument("--tpu", action="store_true", help="train on TPUs")
    section.add_argument("--main_training_function", metavar="NAME", help="the function to call; default: main")
    section.add_argument(
        "--downcast_bf16", action="store_true", help="with bf16: store floats in bf16, and doubles as floats"
    )
    section.add_argument(
        "--tpu_cluster",
        action="store_true",
        default=None,
        dest="tpu_use_cluster",
        help="start this launch on all machines of a pod, by gcloud",
    )
    section.add_argument(
        "--no_tpu_cluster", action="store_false", dest="tpu_use_cluster", help="start it on this machine; the default"
    )
    section.add_argument("--tpu_name", metavar="NAME", help="name of the pod; default: that in the configuration file")
    section.add_argument("--tpu_zone", metavar="ZONE", help="zone of the pod; default: that in the configuration file")
    section.add_argument("--tpu_use_sudo", action="store_true", help="run the launches of the pod as root")
    section.add_argument(
        "--env",
        action="append",
        dest="tpu_env",
        metavar="NAME=VALUE",
        help="a variable for the machines of the pod; may be repeated",
    )
    section.add_argument(
        "--vm", action="append", dest="tpu_vm", metavar="NAME", help="refused: gcloud knows the machines of a pod"
    )


def _add_compiler_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("Compilation", "torch.compile for prepared models.")
    section.add_argument("--dynamo_backend", choices=_DYNAMO_BACKENDS, help="backend")
    section.add_argument(
        "--dynamo_mode", choices=("default", "reduce-overhead", "max-autotune"), help="what to optimise for"
    )
    section.add_argument("--dynamo_use_fullgraph", action="store_true", help="raise an error if the graph breaks")
    section.add_argument("--dynamo_use_dynamic", action="store_true", help="compile for changing shapes")
    section.add_argument("--dynamo_use_regional_compilation", action="store_true", help="compile block by block")


class _Unsaid:
    """The default of a flag, which programs may read, and which tells that the flag was not given."""

    __slots__ = ()


class _UnsaidText(str, _Unsaid):
    __slots__ = ()


class _UnsaidInteger(int, _Unsaid):
    __slots__ = ()


class _UnsaidNumber(float, _Unsaid):
    __slots__ = ()


def _add_sharding_flags(parser: argparse.ArgumentParser) -> None:
    for group in SHARDING:
        section = parser.add_argument_group(group.title)
        section.add_argument(f"--{group.switch}", action="store_true", help=group.meaning)
        for flag in group.flags:
            shown: dict[str, Any] = {"choices": flag.choices} if flag.choices else {"metavar": "VALUE"}
            if flag.choices and flag.is_lowered:
                shown["type"] = str.lower
            elif flag.value_type in (int, float):
                shown["type"] = flag.value_type
            section.add_argument(f"--{flag.name}", default=_default_of(flag), help=flag.meaning, **shown)


def _default_of(flag: ShardingFlag) -> _Unsaid | bool | None:
    """What programs find of ``flag`` where it was not given, as the original has it."""
    if flag.default is None:
        return None
    if flag.value_type is bool:
        return flag.default == "True"
    if flag.value_type is int:
        return _UnsaidInteger(flag.default)
    return _UnsaidNumber(flag.default) if flag.value_type is float else _UnsaidText(flag.default)


def _sharding_in(said: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in SHARDING for name in (group.switch, *group.keys)]
    found = {name: said.get(name) for name in names}
    return {name: value for name, value in found.items() if _is_said(value)}


def _is_said(value: Any) -> bool:
    return value not in (None, "") and value is not False and not isinstance(value, _Unsaid)


def _add_unsupported_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags that do nothing yet: programs may read them, and a launch refuses them."""
    for group in GROUPS:
        section = parser.add_argument_group(f"{group.title}, not yet")
        for flag in group.flags:
            if flag.takes_value:
                section.add_argument(f"--{flag.name}", metavar="VALUE", help=flag.meaning)
            else:
                section.add_argument(f"--{flag.name}", action="store_true", help=flag.meaning)


def _refuse_unsupported(args: argparse.Namespace) -> None:
    for group in GROUPS:
        for flag in group.flags:
            if getattr(args, flag.name, None) not in (None, False):
                raise InvalidArgument(group.sentence(flag))


def _add_fp8_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("fp8", "The recipe of --mixed_precision fp8.")
    for name, (meaning, choices) in FP8_FLAGS.items():
        if name == "use_autocast_during_eval":
            section.add_argument(f"--fp8_{name}", action="store_true", help=meaning)
        else:
            shown = {"choices": choices} if choices else {"metavar": "VALUE"}
            section.add_argument(f"--fp8_{name}", help=meaning, **shown)


def _add_hostfile_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("Machines from a file")
    section.add_argument(
        "--hostfile",
        metavar="FILE",
        help="start a launcher on each machine in FILE, which has lines with a name and slots=N",
    )
    section.add_argument("--ssh", metavar="COMMAND", default=_SSH, help=f"how to reach these machines; default: {_SSH}")


def _add_supervision_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("Supervision")
    section.add_argument(
        "--max_restarts",
        type=integer_from(0),
        default=0,
        metavar="N",
        help="restart all workers after a failure, up to N times",
    )
    section.add_argument(
        "--monitor_interval",
        type=float,
        default=0.1,
        metavar="S",
        help="for torch's agent; this launcher needs no interval",
    )
    section.add_argument("--log_dir", metavar="DIR", help="folder for the output of each rank, and a report")
    section.add_argument(
        "-t",
        "--tee",
        default="0",
        metavar="STREAMS",
        help="show with ranks, and write to log_dir: 1 standard output, 2 standard error, 3 both, or as 0:3,1:2",
    )
    section.add_argument("--monitor", action="store_true", help="show the progress of each rank, and which one is slow")
    section.add_argument("--ends_with_stdin", action="store_true", help="end the run when standard input ends")
    section.add_argument("--report", metavar="FILE", help="write what happened to each worker, as JSON")


def _add_script_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry_run", action="store_true", help="show what would be started, and start nothing")
    parser.add_argument("--no_python", action="store_true", help="run the script as a separate program, without Python")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not report which rank failed first")
    add_script(parser, "path of the script; with -m, the module; with --no_python, the program")


def add_script(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds the script that a command runs, described by ``meaning``, and the flags for running it."""
    parser.add_argument(
        "--alias", action="store_true", help="give scripts that import accelerate accelerate_cpp instead"
    )
    parser.add_argument("-m", "--module", action="store_true", help="run the script as a module, like python -m")
    parser.add_argument("training_script", help=meaning)
    rest = parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else a missing script is reported as two missing arguments


def launch_options(args: argparse.Namespace, **others: Any) -> LaunchOptions:
    """What ``args`` says, and ``others`` of what it does not say.

    Raises:
        InvalidArgument: it says something that does not work yet.
    """
    _refuse_unsupported(args)
    if getattr(args, "tpu_vm", None):
        raise InvalidArgument(
            "--vm: the machines of a pod are those of its name; leave it out, and pass --tpu_name and --tpu_zone"
        )
    said = vars(args)
    names = {field.name for field in fields(LaunchOptions)} & said.keys()
    fp8 = {name: said[f"fp8_{name}"] for name in FP8_FLAGS if said.get(f"fp8_{name}") not in (None, False)}
    own = {"fp8": fp8, "sharding": _sharding_in(said)}
    return LaunchOptions(**{name: said[name] for name in names} | own | others)


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Completes ``args`` from the environment, the configuration file and defaults.

    Returns:
        ``args``, the content of the configuration file (``None`` without one), and whether the precision comes from it.

    Raises:
        InvalidArgument: settings cannot be combined, or one is not supported yet.
    """
    from accelerate_cpp.commands.config_args import load_config_from_file

    plan = resolve(launch_options(args, training_script_args=tuple(args.training_script_args)))
    for name, setting in plan.settings.items():
        setattr(args, name, setting.value)
    args.num_processes, args.use_cpu = plan.group.world_size, args.cpu
    for group in SHARDING:
        setattr(args, group.switch, bool(plan.group.sharding.get(group.switch_variable)))
    path = files.path_of(args.config_file)
    defaults = load_config_from_file(path) if args.config_file is not None or path.is_file() else None
    return args, defaults, plan.settings["mixed_precision"].source.startswith(f"{path}:")


def launch_command(args: argparse.Namespace) -> int:
    """Runs the launch that ``args`` describes and returns its exit status."""
    if args.hostfile is not None:
        _refuse_unsupported(args)
        return _launch_on_machines(args)
    return run_launch(args, quiet=args.quiet, dry_run=args.dry_run)


def run_launch(args: argparse.Namespace, quiet: bool = False, dry_run: bool = False) -> int:
    """Runs the script in ``args`` on this machine with the settings in ``args``, and returns the exit status.

    Raises:
        BuildMismatch: the script would not be able to load the C++ module.
    """
    if not (dry_run or getattr(args, "no_python", False)):
        require_fitting_torch()
    options = launch_options(args, training_script_args=tuple(args.training_script_args))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        plan = resolve(options)
    for warning in told:
        say(f"accelerate-cpp launch: {warning.message}")
    for remark in () if quiet else remarks(plan, options):
        say(f"accelerate-cpp launch: {remark}")
    if plan.tpus is not None and plan.tpus.pod is not None:
        return _launch_on_pod(args, plan.tpus.pod, dry_run)
    if plan.mpirun is not None:
        return _launch_through_mpi(args, plan.mpirun, plan, dry_run)
    if dry_run:
        from accelerate_cpp.launch.plan.dry_run import render  # imported here, because most launches do not need these

        print(render(plan))
        return 0
    plan.logs.make_folder()
    if plan.tpus is not None:
        from accelerate_cpp.launch.fork.tpu import run_script_on_tpus

        return run_script_on_tpus(plan, plan.tpus)
    if plan.deepspeed is not None:
        from accelerate_cpp.launch.workers.over_deepspeed import run_deepspeed

        return run_deepspeed(plan, plan.deepspeed, quiet=quiet)
    if plan.agent is not None:
        from accelerate_cpp.launch.plan.elastic_agent import become_agent

        become_agent(plan, plan.agent)
    if plan.elastic is not None:
        from accelerate_cpp.launch.elastic.run import execute_elastic

        return execute_elastic(plan, plan.elastic, quiet=quiet)
    return execute(plan, quiet=quiet)


def _launch_through_mpi(args: argparse.Namespace, hostfile: Path, plan: LaunchPlan, dry_run: bool) -> int:
    """Makes MPI start this same launch on each machine in a file."""
    from accelerate_cpp.launch.workers.over_mpi import mpirun_command

    flags, script = _given_flags(args)
    command = mpirun_command(hostfile, plan.group.launchers, [*flags, *script])
    if dry_run:
        print(shlex.join(command))
        return 0
    os.execvp(command[0], command)


def _launch_on_pod(args: argparse.Namespace, pod: Pod, dry_run: bool) -> int:
    """Makes gcloud start this same launch on each machine of a pod."""
    from accelerate_cpp.launch.workers.over_gcloud import launch_on_each, require_gcloud

    flags, script = _given_flags(args)
    command = launch_on_each(pod, flags, script)
    if dry_run:
        print(shlex.join(command))
        return 0
    require_gcloud("launch --tpu_cluster")
    os.execvp(command[0], command)


def _given_flags(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The command line of this launch: its flags except ``--dry_run``, and the script with its arguments."""
    script = [args.training_script, *args.training_script_args]
    given = sys.argv[2:] if sys.argv[1] in ("launch", "test") else sys.argv[1:]
    flags = given[: -len(script)] if given[-len(script) :] == script else given
    return [flag for flag in flags if flag not in ("--dry_run", "--dry-run")], script


def _launch_on_machines(args: argparse.Namespace) -> int:
    """Starts this same launch on each machine in a file."""
    from accelerate_cpp.launch.workers.over_ssh import launcher_commands, read_hostfile, run_launchers

    machines = read_hostfile(Path(args.hostfile))
    if args.least_machines is not None:
        raise InvalidArgument(
            f"--hostfile {args.hostfile} ends all machines when one is lost, but --num_machines "
            f"{args.least_machines}:{args.num_machines} asks to go on: start this launcher on each machine yourself"
        )
    given, script = _given_flags(args)
    flags, tokens = [], iter(given)
    for token in tokens:
        name, equals, _ = token.partition("=")
        if name in ("--hostfile", "--ssh"):
            if not equals:
                next(tokens)
        else:
            flags.append(token)
    commands = launcher_commands(machines, flags, script, args.ssh)
    if args.dry_run:
        for machine, command in zip(machines, commands, strict=True):
            print(f"{machine.name}: {shlex.join(command)}")
        return 0
    return run_launchers(machines, commands, quiet=args.quiet)


def run_command(parser: argparse.ArgumentParser) -> int:
    """Parses the command line, runs its command, and turns refusals into one sentence on standard error."""
    open_standard_streams()
    args = parser.parse_args()
    try:
        return int(args.func(args))
    except AccelerateError as error:
        say(f"{parser.prog}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def main() -> int:
    """Entry point of ``python -m accelerate_cpp.commands.launch``."""
    return run_command(launch_command_parser())


if __name__ == "__main__":
    sys.exit(main())
