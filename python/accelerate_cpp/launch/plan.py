"""The plan of one launch, resolved once from the flags, the caller's environment and the host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate_cpp.config import file as config_file
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import shares_of_launch
from accelerate_cpp.launch.environment import WorkerGroup, threads_per_worker
from accelerate_cpp.launch.settings import Setting, fp8_recipe, resolved


@dataclass(frozen=True)
class LaunchOptions:
    """The flags of ``accelerate-cpp launch`` as they were given; ``None`` where a flag was not."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    cpu: bool = False
    multi_gpu: bool = False
    num_processes: int | None = None
    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    num_cpu_threads_per_process: int | None = None
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    gpu_ids: str | None = None
    module: bool = False
    no_python: bool = False
    debug: bool = False
    enable_cpu_affinity: bool = False
    config_file: str | None = None
    fp8: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch does: the command that every worker runs and what the workers are told.

    ``settings`` say where everything came from.
    """

    command: tuple[str, ...]
    group: WorkerGroup
    settings: Mapping[str, Setting] = field(default_factory=dict)


def resolve(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """The plan for ``options`` under ``environ`` (default ``os.environ``), or :class:`InvalidArgument`."""
    command = _command(options, os.environ if environ is None else environ)
    group, settings = resolve_group(options, environ)
    return LaunchPlan(command, group, settings)


def resolve_group(
    options: LaunchOptions, environ: Mapping[str, str] | None = None
) -> tuple[WorkerGroup, dict[str, Setting]]:
    """What the workers of a launch are told, whatever they run, and where that was said."""
    environ = os.environ if environ is None else environ
    if options.cpu and options.multi_gpu:
        raise InvalidArgument("--cpu and --multi_gpu exclude each other: pass one of them")
    file = config_file.find(options.config_file, environ)
    settings = resolved(options, environ, file)
    said = {name: setting.value for name, setting in settings.items()}
    _check_machines(settings)
    # Of what the file says and what a flag says, the flag counts.
    cpu = said["cpu"] and not options.multi_gpu
    gpu_ids = _gpu_ids(said["gpu_ids"], cpu)
    visible = environ if gpu_ids is None else {**environ, "CUDA_VISIBLE_DEVICES": gpu_ids}
    num_processes = _num_processes(settings, cpu, visible)
    shares = shares_of_launch(num_processes, visible, on_gpus=not cpu) if said["enable_cpu_affinity"] else ()
    group = WorkerGroup(
        num_processes=num_processes,
        cpu=cpu,
        mixed_precision=said["mixed_precision"],
        num_threads=threads_per_worker(num_processes, said["num_cpu_threads_per_process"], environ, shares),
        master_addr=said["main_process_ip"] or "127.0.0.1",
        master_port=said["main_process_port"] or host.free_port(),
        debug=said["debug"],
        gradient_accumulation_steps=said["gradient_accumulation_steps"],
        gpu_ids=gpu_ids,
        shares=shares,
        fp8=fp8_recipe(environ, file, options.fp8) if said["mixed_precision"] == "fp8" else {},
    )
    effective = {"cpu": cpu, "num_processes": num_processes, "num_cpu_threads_per_process": group.num_threads}
    return group, settings | {name: replace(settings[name], value=value) for name, value in effective.items()}


def _num_processes(settings: Mapping[str, Setting], cpu: bool, visible: Mapping[str, str]) -> int:
    setting, multi_gpu = settings["num_processes"], settings["multi_gpu"]
    number = setting.value
    if number is None:
        number = 1 if cpu else max(1, host.gpu_count(visible))
    if number < 1:
        raise InvalidArgument(
            f"num_processes is {number} ({setting.source}), and must be at least 1: pass --num_processes"
        )
    if multi_gpu.value and not cpu and number < 2:
        raise InvalidArgument(
            f"multi_gpu ({multi_gpu.source}) needs at least 2 processes, but this launch has {number}: "
            "pass --num_processes, or leave --multi_gpu out"
        )
    return int(number)


def _check_machines(settings: Mapping[str, Setting]) -> None:
    machines, rank = settings["num_machines"], settings["machine_rank"]
    if machines.value != 1:
        raise InvalidArgument(
            f"num_machines is {machines.value} ({machines.source}): this command starts workers on one machine only; "
            "for several machines start the script with torchrun on each"
        )
    if rank.value != 0:
        raise InvalidArgument(f"machine_rank is {rank.value} ({rank.source}): with one machine the only rank is 0")


def _gpu_ids(gpu_ids: str | None, cpu: bool) -> str | None:
    """The text for ``CUDA_VISIBLE_DEVICES``, or ``None`` to leave it as it is."""
    if gpu_ids is None or gpu_ids.strip() == "all" or cpu:
        return None
    entries = [entry.strip() for entry in gpu_ids.split(",")]
    if not all(entries):
        raise InvalidArgument(f"gpu_ids {gpu_ids!r}: expected 'all' or ids with commas between, such as 0,1")
    return ",".join(entries)


def _command(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    script, arguments = options.training_script, options.training_script_args
    if options.module and options.no_python:
        raise InvalidArgument("--module and --no_python exclude each other: pass one of them")
    if options.no_python:
        program = shutil.which(script, path=environ.get("PATH"))
        if program is None:
            raise InvalidArgument(f"--no_python: no executable {script!r} here or in PATH")
        return (program, *arguments)
    if options.module:
        return (sys.executable, "-m", script, *arguments)
    if not Path(script).exists():
        raise InvalidArgument(f"there is no script {script!r} in {Path.cwd()}")
    return (sys.executable, script, *arguments)
