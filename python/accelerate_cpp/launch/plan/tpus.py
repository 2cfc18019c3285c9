"""The part of a launch that concerns TPUs: which function torch_xla's workers call, and on which machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.environment import WorkerGroup

# What this launcher does with workers that it starts itself.
_OF_OWN_WORKERS = ("log_dir", "report", "monitor", "max_restarts", "ends_with_stdin")


@dataclass(frozen=True)
class Pod:
    """The machines on which a launch has to be started first.

    Attributes:
        name, zone: as gcloud knows them.
        variables: ``NAME=VALUE`` for each of the machines.
        as_root: whether the launches run by sudo.
    """

    name: str
    zone: str
    variables: tuple[str, ...] = ()
    as_root: bool = False


@dataclass(frozen=True)
class TpuLaunch:
    """What the workers do.

    Attributes:
        script: the path of the script, or with ``is_module`` the name of the module.
        arguments: its arguments, ``sys.argv[1:]`` there.
        function: what is called in it, without arguments.
        alone: start one worker, on one TPU, instead of one for each.
        pod: where the launch is started, if not here.
    """

    script: str
    arguments: tuple[str, ...]
    function: str
    is_module: bool = False
    alone: bool = False
    pod: Pod | None = None


def tpu_launch(options: Any, settings: Mapping[str, Any], group: WorkerGroup) -> TpuLaunch | None:
    """The part of a launch for TPUs; ``None`` for one on other devices.

    Args:
        options: the flags as attributes.
        settings: those of the launch, with their sources.

    Raises:
        InvalidArgument: something that torch_xla does not start, or a pod without a name or a zone.
    """
    said = {name: setting.value for name, setting in settings.items()}
    if not said["tpu"]:
        return None
    source = settings["tpu"].source
    if options.no_python:
        raise InvalidArgument(f"--no_python: on TPUs ({source}) a function of a Python script is called; leave it out")
    if group.launchers.count > 1:
        raise InvalidArgument(
            f"{group.launchers.count} machines ({group.launchers.source}): on TPUs ({source}) the machines of a pod "
            "find each other; start the launch on each of them with --num_machines 1, or pass --tpu_cluster"
        )
    if group.trains_through_deepspeed:
        raise InvalidArgument(f"DeepSpeed does not train on TPUs ({source}); leave it out")
    return TpuLaunch(
        options.training_script,
        tuple(options.training_script_args),
        said["main_training_function"],
        options.module,
        alone=settings["num_processes"].source == "--num_processes" and said["num_processes"] == 1,
        # Of flags, False is as good as none elsewhere; here it is --no_tpu_cluster.
        pod=_pod(said, "--env" if options.tpu_env else settings["tpu_env"].source)
        if said["tpu_use_cluster"] and options.tpu_use_cluster is not False
        else None,
    )


def _pod(said: Mapping[str, Any], source_of_variables: str) -> Pod:
    for name in ("tpu_name", "tpu_zone"):
        if not said[name]:
            raise InvalidArgument(f"--tpu_cluster: {name} is unknown: pass --{name}, or write it into the file")
    for number, text in enumerate(said["tpu_env"] or (), 1):
        name, equals, _ = text.partition("=")
        if not equals or not name.isidentifier():  # what follows the name may be a secret
            found = f"the name {name[:200]!r}" if equals else 'a text without "="'
            raise InvalidArgument(
                f"variable {number} for the machines of the pod ({source_of_variables}): expected NAME=VALUE, found "
                f"{found}: correct it, or leave it out"
            )
    return Pod(said["tpu_name"], said["tpu_zone"], tuple(said["tpu_env"] or ()), said["tpu_use_sudo"])


def remarks_on_tpus(tpus: TpuLaunch | None, options: Any) -> Iterator[str]:
    """Sentences about flags that do nothing in a launch on TPUs."""
    names = [name for name in _OF_OWN_WORKERS if getattr(options, name)] + ["tee"] * (options.tee != "0")
    if tpus is not None and names:
        yield f"{', '.join(f'--{name}' for name in names)}: no effect, as torch_xla starts the workers on TPUs"
    if tpus is not None and not tpus.alone and options.num_processes is not None:
        yield "--num_processes: no effect, as torch_xla starts one worker for each TPU; 1 starts one"
