"""For programs that start processes themselves: the command and environment of a launch, and a wrapper of functions.

``launch_command`` of ``accelerate_cpp.commands.launch`` also starts and supervises the processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.launch import launch_options
from accelerate_cpp.config import env_table
from accelerate_cpp.config.plugin_variables import DEEPSPEED_CONFIGURED
from accelerate_cpp.config.sharding_flags import DEEPSPEED
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.deepspeed_launcher import DEFAULT_WAY, deepspeed_launcher
from accelerate_cpp.launch.plan.environment import WorkerGroup, group_environment, worker_environment
from accelerate_cpp.launch.plan.host_resources import free_port
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, resolve, resolve_group
from accelerate_cpp.plugins.enums import DistributedType
from accelerate_cpp.utils.not_yet import prepare_sagemager_args_inputs

__all__ = [
    "PrepareForLaunch",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
]

__getattr__ = lending("utils.launch")

# The variables that differ between the workers of one launch.
_OF_ONE_WORKER = (env_table.RANK, env_table.LOCAL_RANK, env_table.RENDEZVOUS_FD)


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the full environment of the process that ``accelerate-cpp launch`` would start for ``args``.

    Args:
        args: what ``launch_command_parser()`` returned; a configuration file and the environment are used as in a
            launch.

    Raises:
        InvalidArgument: the launch has several processes, or MPI starts it, or it has settings that cannot be combined.
    """
    plan = _plan(args)
    if plan.group.world_size > 1 or plan.mpirun is not None:
        raise InvalidArgument(
            f"prepare_simple_launcher_cmd_env: expected a launch of one process, found {plan.group.world_size}"
            f"{' on the machines of a file of MPI' if plan.mpirun else ''}; pass args to launch_command"
        )
    return list(plan.command), worker_environment(plan.group, 0, rendezvous_fd=-1)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The common environment of the processes that ``accelerate-cpp launch`` would start here for ``args``.

    The program that starts them adds ``RANK`` and ``LOCAL_RANK`` for each.

    Args:
        args: what ``launch_command_parser()`` returned, or part of it, because the script is not used; a configuration
            file and the environment are used as in a launch. Its ``master_port`` is set to the port, as a string.

    Raises:
        InvalidArgument: the launch has settings that cannot be combined.
    """
    group, _ = resolve_group(_options(args))
    environment = worker_environment(group, 0, rendezvous_fd=-1)
    args.master_port = str(group.master_port or free_port())
    for row in _OF_ONE_WORKER:
        environment.pop(row.name, None)
    return environment


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """The command and the environment by which ``accelerate-cpp launch --use_deepspeed`` would start processes.

    Args:
        args: what ``launch_command_parser()`` returned; a configuration file and the environment are used as in a
            launch. It gets the values that are not said, and where there is no command those of torchrun:
            ``nproc_per_node``, ``master_port`` and, on several machines, ``nnodes``, ``node_rank`` and ``master_addr``
            or, if they are not in one network, ``rdzv_endpoint``.

    Returns:
        The command of DeepSpeed's own launcher, or ``None`` if the machines have no file for it, and the environment,
        to which the program that starts the processes adds ``RANK`` and the like.

    Raises:
        InvalidArgument: the launch has settings that cannot be combined.
    """
    options = _options(args)
    group, settings = resolve_group(replace(options, sharding={**options.sharding, DEEPSPEED.switch: True}))
    launcher = deepspeed_launcher(settings)
    if launcher is None:
        command, environment = None, group_environment(group, env_table.environment_here())
        _tell_torchrun(args, group)
    else:
        script = (options.training_script, *options.training_script_args)
        command = launcher.command(group.master_port, script, module=options.module, no_python=options.no_python)
        environment = launcher.environment(group)
    args.main_process_port = group.master_port
    args.deepspeed_multinode_launcher = settings["deepspeed_multinode_launcher"].value or DEFAULT_WAY
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", None)
    if fields is not None:  # as the original's launch_command passes them
        environment |= env_table.render({DEEPSPEED_CONFIGURED: fields.lower()})
    return command, environment


def _tell_torchrun(args: argparse.Namespace, group: WorkerGroup) -> None:
    args.nproc_per_node, port = str(group.num_processes), str(group.master_port)
    if group.launchers.count == 1:
        args.master_port = port
        return
    args.nnodes, args.node_rank = str(group.launchers.count), group.launchers.rank
    if getattr(args, "same_network", False):
        args.master_addr, args.master_port = group.master_addr, port
    else:
        args.rdzv_endpoint = f"{group.master_addr}:{port}"


def _plan(args: argparse.Namespace) -> LaunchPlan:
    return resolve(_options(args))


def _options(args: argparse.Namespace) -> LaunchOptions:
    script = {"training_script": getattr(args, "training_script", "")}
    return launch_options(args, training_script_args=tuple(getattr(args, "training_script_args", ())), **script)


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """The result of ``parser`` for ``default_args``, updated with the values of ``args``."""
    filtered, _ = parser.parse_known_args(list(default_args))
    known = vars(filtered).keys()
    vars(filtered).update({name: value for name, value in vars(args).items() if name in known})
    return filtered


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Flags of a script and their values as a dict: ``["--lr", "0.1", "--debug", "False"]``.

    Names lose their leading dashes, and other dashes become underscores. ``True`` and ``False`` become booleans,
    numbers become ``int`` or ``float``; other values stay strings.

    Raises:
        InvalidArgument: a flag has no value, has several, or comes twice.
    """
    found: dict[str, Any] = {}
    tokens = list(nargs)
    for flag, text in zip(tokens[::2], [*tokens[1::2], None], strict=False):
        name = flag.lstrip("-").replace("-", "_")
        if not _is_flag(flag) or text is None or _is_flag(text) or name in found:
            raise InvalidArgument(
                f"arguments {' '.join(tokens)!r}, at {flag!r}: expected each flag once, followed by one value, such as "
                "--lr 0.1 --debug False"
            )
        found[name] = _typed(text)
    return found


def _is_flag(text: str) -> bool:
    return text.startswith("-") and isinstance(_typed(text), str)


def _typed(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds the variables for workers on TPUs to ``current_env``.

    Args:
        args: what ``launch_command_parser()`` returned; ``mixed_precision``, ``downcast_bf16`` and ``debug`` are used.
        pod: also sets ``args.vm`` and ``args.tpu``, the machines and the name of the pod.

    Returns:
        Both arguments.
    """
    told: dict[Any, Any] = {}
    if args.mixed_precision == "bf16" and args.downcast_bf16:
        told |= {env_table.DOWNCAST_BF16: True, env_table.XLA_DOWNCAST_BF16: True}
    if args.debug:
        told[env_table.DEBUG_MODE] = True
    current_env.update(env_table.render(told))
    if pod:
        args.vm, args.tpu = args.tpu_vm, args.tpu_name
    return args, current_env


class PrepareForLaunch:
    """A wrapper of a function for processes that are not started by the launchers of this package.

    Args:
        launcher: the function.
        distributed_type: the type of the run. If it is one of ``MULTI_…``, each process gets its rank; on the machine
            number ``NODE_RANK``, ranks start at ``NODE_RANK * NPROC``. The caller sets ``WORLD_SIZE``, ``MASTER_ADDR``
            and ``MASTER_PORT``.
        debug: connect the ``WORLD_SIZE`` processes over Gloo, through the file that ``ACCELERATE_DEBUG_RDV_FILE``
            names; ``distributed_type`` is then ignored.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Runs the function with ``args`` as process number ``index`` of this machine; its result is dropped.

        Only while it runs, ``FORK_LAUNCHED`` and its ranks are in the environment.

        Raises:
            InvalidArgument: ``debug`` without the two variables.
        """
        told: dict[Any, Any] = {env_table.FORK_LAUNCHED: True}
        if self.debug:
            _connect_through_file(index)
        elif self.distributed_type.value.startswith("MULTI_"):
            first = env_table.NODE_RANK.get() * env_table.NPROC.get()
            told |= {env_table.LOCAL_RANK: index, env_table.RANK: first + index}
        with env_table.replaced_environment(env_table.render(told)):
            self.launcher(*args)


def _connect_through_file(rank: int) -> None:
    file, world_size = env_table.DEBUG_RDV_FILE.get(), env_table.WORLD_SIZE.get()
    if file is None or world_size is None:
        raise InvalidArgument(
            "PrepareForLaunch(debug=True): expected ACCELERATE_DEBUG_RDV_FILE and WORLD_SIZE in the environment, found "
            f"{file!r} and {world_size!r}; debug_launcher needs neither"
        )
    dist.init_process_group("gloo", store=dist.FileStore(file, world_size), rank=rank, world_size=world_size)
