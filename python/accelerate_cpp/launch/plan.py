"""The plan of one launch, resolved once from the flags, the caller's environment and the host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import shares_of_launch
from accelerate_cpp.launch.environment import WorkerGroup, threads_per_worker


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


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch does: the command that every worker runs and what the workers are told."""

    command: tuple[str, ...]
    group: WorkerGroup


def resolve(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """The plan for ``options`` under ``environ`` (default ``os.environ``), or :class:`InvalidArgument`."""
    environ = os.environ if environ is None else environ
    _check_machines(options)
    command = _command(options, environ)
    cpu = options.cpu or env_table.USE_CPU.get(environ)
    gpu_ids = _gpu_ids(options, cpu)
    visible = environ if gpu_ids is None else {**environ, "CUDA_VISIBLE_DEVICES": gpu_ids}
    num_processes = options.num_processes
    if num_processes is None:
        num_processes = 1 if cpu else max(1, host.gpu_count(visible))
    if options.multi_gpu and num_processes < 2:
        raise InvalidArgument(
            f"--multi_gpu needs at least 2 processes, but this launch has {num_processes}: "
            "pass --num_processes, or leave --multi_gpu out"
        )
    pins = options.enable_cpu_affinity or env_table.CPU_AFFINITY.get(environ)
    shares = shares_of_launch(num_processes, visible, on_gpus=not cpu) if pins else ()
    return LaunchPlan(
        command,
        WorkerGroup(
            num_processes=num_processes,
            cpu=cpu,
            mixed_precision=options.mixed_precision or env_table.MIXED_PRECISION.get(environ) or "no",
            num_threads=threads_per_worker(num_processes, options.num_cpu_threads_per_process, environ, shares),
            master_addr=options.main_process_ip or "127.0.0.1",
            master_port=options.main_process_port or host.free_port(),
            debug=options.debug or env_table.DEBUG_MODE.get(environ),
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            gpu_ids=gpu_ids,
            shares=shares,
        ),
    )


def _check_machines(options: LaunchOptions) -> None:
    if options.num_machines not in (None, 1):
        raise InvalidArgument(
            f"--num_machines {options.num_machines}: this command starts workers on one machine only; "
            "for several machines start the script with torchrun on each"
        )
    if options.machine_rank not in (None, 0):
        raise InvalidArgument(f"--machine_rank {options.machine_rank}: with one machine the only rank is 0")
    if options.cpu and options.multi_gpu:
        raise InvalidArgument("--cpu and --multi_gpu exclude each other: pass one of them")


def _gpu_ids(options: LaunchOptions, cpu: bool) -> str | None:
    """The text for ``CUDA_VISIBLE_DEVICES``, or ``None`` to leave it as it is."""
    if options.gpu_ids is None or options.gpu_ids.strip() == "all" or cpu:
        return None
    entries = [entry.strip() for entry in options.gpu_ids.split(",")]
    if not all(entries):
        raise InvalidArgument(f"--gpu_ids {options.gpu_ids!r}: expected 'all' or ids with commas between, such as 0,1")
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
