"""Commands on all machines of a TPU pod, by Google Cloud's own program."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.tpus import Pod

_OF_THE_CALLER = ("--tpu_cluster", "--tpu-cluster", "--tpu_use_sudo", "--tpu-use-sudo")
_WITH_VALUE = ("--env", "--tpu_name", "--tpu-name", "--tpu_zone", "--tpu-zone")


def on_all_machines(name: str, zone: str, text: str, alpha: bool = False) -> list[str]:
    """The command that runs the shell commands ``text`` on each machine of the pod ``name``."""
    program = ["gcloud", *(["alpha"] if alpha else [])]
    where = ["compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone]
    return [*program, *where, "--command", text, "--worker", "all"]


def launch_on_each(pod: Pod, flags: Sequence[str], script: Sequence[str]) -> list[str]:
    """The command that starts this launch on each machine of ``pod``, in the folder of the caller.

    Args:
        flags: of the launch; those that concern the pod are left out.
        script: with its arguments.
    """
    left, tokens = [], iter(flags)
    for token in tokens:
        name, equals, _ = token.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                next(tokens)
        elif name not in _OF_THE_CALLER:
            left.append(token)
    if "--tpu" not in left:
        left.insert(0, "--tpu")  # the file of the caller may have said so
    in_pod = [f"{name}={text}" for name, text in env_table.render({env_table.IN_TPU_POD: True}).items()]
    variables = [*in_pod, *pod.variables]
    root = ["sudo"] if pod.as_root else []
    launch = [*root, "env", *variables, "accelerate-cpp", "launch", *left, "--no_tpu_cluster", "--num_machines", "1"]
    return on_all_machines(pod.name, pod.zone, f"cd {shlex.quote(os.getcwd())} && {shlex.join([*launch, *script])}")


def require_gcloud(command: str) -> None:
    """Raises :class:`InvalidArgument` where gcloud is not installed."""
    if shutil.which("gcloud") is None:
        raise InvalidArgument(
            f"{command}: there is no gcloud in PATH; install the Google Cloud CLI, or see the command with "
            f"{'--debug' if command == 'tpu-config' else '--dry_run'}"
        )
