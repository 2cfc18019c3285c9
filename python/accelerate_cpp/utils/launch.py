"""What programs need that start processes themselves: command and environment of a launch, and a wrapper of functions.

``launch_command`` of ``accelerate_cpp.commands.launch`` starts and watches the processes as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.commands.launch import launch_options
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.environment import worker_environment
from accelerate_cpp.launch.plan.host_resources import free_port
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, resolve, resolve_group
from accelerate_cpp.plugins.enums import DistributedType
from accelerate_cpp.utils.not_yet import prepare_deepspeed_cmd_env, prepare_sagemager_args_inputs, prepare_tpu

__all__ = [
    "PrepareForLaunch",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
]

__getattr__ = lending("utils.launch")

# What tells the workers of one launch from each other.
_OF_ONE_WORKER = (env_table.RANK, env_table.LOCAL_RANK, env_table.RENDEZVOUS_FD)


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command and whole environment of the process that ``accelerate-cpp launch`` would start for ``args``.

    Args:
        args: what ``launch_command_parser()`` returned; a configuration file and the environment count as in a launch.

    Raises:
        InvalidArgument: the launch has several processes, or MPI starts it, or it has settings that do not go together.
    """
    plan = _plan(args)
    if plan.group.world_size > 1 or plan.mpirun is not None:
        raise InvalidArgument(
            f"prepare_simple_launcher_cmd_env: expected a launch of one process, found {plan.group.world_size}"
            f"{' on the machines of a file of MPI' if plan.mpirun else ''}; pass args to launch_command"
        )
    return list(plan.command), worker_environment(plan.group, 0, rendezvous_fd=-1)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment that all processes have in common which ``accelerate-cpp launch`` would start here for ``args``.

    Who starts them adds ``RANK`` and ``LOCAL_RANK`` for each.

    Args:
        args: what ``launch_command_parser()`` returned, or part of it, as the script is not looked at; a configuration
            file and the environment count as in a launch. It gets a ``master_port``, the text of the port.

    Raises:
        InvalidArgument: the launch has settings that do not go together.
    """
    group, _ = resolve_group(_options(args))
    environment = worker_environment(group, 0, rendezvous_fd=-1)
    args.master_port = str(group.master_port or free_port())
    for row in _OF_ONE_WORKER:
        environment.pop(row.name, None)
    return environment


def _plan(args: argparse.Namespace) -> LaunchPlan:
    return resolve(_options(args))


def _options(args: argparse.Namespace) -> LaunchOptions:
    script = {"training_script": getattr(args, "training_script", "")}
    return launch_options(args, training_script_args=tuple(getattr(args, "training_script_args", ())), **script)


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """What ``parser`` makes of ``default_args``, with the values that ``args`` has for it."""
    filtered, _ = parser.parse_known_args(list(default_args))
    known = vars(filtered).keys()
    vars(filtered).update({name: value for name, value in vars(args).items() if name in known})
    return filtered


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Flags of a script and their values as a dict: ``["--lr", "0.1", "--debug", "False"]``.

    Names lose their leading dashes, and other dashes become underscores. ``True`` and ``False`` become booleans,
    numbers become ``int`` if they are whole, else ``float``; other values stay texts.

    Raises:
        InvalidArgument: a flag has no value, has several, or comes twice.
    """
    found: dict[str, Any] = {}
    tokens = list(nargs)
    for flag, text in zip(tokens[::2], [*tokens[1::2], None], strict=False):
        name = flag.lstrip("-").replace("-", "_")
        if not _is_flag(flag) or text is None or _is_flag(text) or name in found:
            raise InvalidArgument(
                f"arguments {' '.join(tokens)!r}, at {flag!r}: expected each flag once, with one value behind it, such "
                "as --lr 0.1 --debug False"
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


class PrepareForLaunch:
    """A function, as each process calls it that something else than our launchers starts.

    Args:
        launcher: the function.
        distributed_type: of the run. If it is one of ``MULTI_…``, each process is told its rank, which on the machine
            number ``NODE_RANK`` counts from ``NODE_RANK * NPROC``. ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``
            are for the caller to set.
        debug: connect the processes over Gloo, through the file that ``ACCELERATE_DEBUG_RDV_FILE`` names and of whose
            users ``WORLD_SIZE`` is the number; ``distributed_type`` does not count then.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Runs the function with ``args`` as the process number ``index`` of this machine; what it returns is dropped.

        While it runs, and no longer, ``FORK_LAUNCHED`` and its ranks are in the environment.

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
