"""The plan of one launch, resolved once from the flags, the caller's environment and the host."""

from __future__ import annotations

import os
import site
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.config import file as config_file
from accelerate_cpp.config.libraries import has_code
from accelerate_cpp.devices.affinity import shares_of_launch
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.deepspeed_launcher import WITHOUT_RANKS, DeepSpeedLauncher, deepspeed_launcher
from accelerate_cpp.launch.plan.environment import ElasticSteps, WorkerGroup, threads_per_worker
from accelerate_cpp.launch.plan.machines import (
    ALONE,
    DEFAULT_PORT,
    Launchers,
    find_launchers,
    refuse_batch_job,
    started_by_mpi,
)
from accelerate_cpp.launch.plan.settings import (
    DEFAULT,
    Setting,
    compiler,
    fp8_recipe,
    kind_of_training,
    resolved,
    sharding,
)
from accelerate_cpp.launch.plan.tpus import TpuLaunch, remarks_on_tpus, tpu_launch
from accelerate_cpp.launch.workers.program import STDERR, STDOUT
from accelerate_cpp.launch.workers.streams import Logs, parse_tee

_ALIAS_FILE = "accelerate_cpp_start.pth"


@dataclass(frozen=True)
class Agent:
    """The settings of torch's elastic agent.

    Attributes:
        rdzv_backend: ``c10d``, ``etcd-v2``, ….
        rdzv_conf: its options, ``key=value``, separated by commas.
        role: name of the workers.
        monitor_interval: seconds between two looks at the workers.
        tee: as torchrun has it.
        is_host: whether this agent holds the store of the rendezvous; ``None`` lets torch go by its name.
        least_machines: how many machines are enough to go on with; ``None``: all.
    """

    rdzv_backend: str
    rdzv_conf: str = ""
    role: str = "default"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    tee: str = "0"
    is_host: bool | None = None
    least_machines: int | None = None


@dataclass(frozen=True)
class ElasticRun:
    """A run that goes on with fewer machines, led by the launcher on one of them.

    Attributes:
        least_machines: how many are enough.
        is_numbered: whether this launcher knows the number of its machine, of which 0 leads; else the first launcher on
            the machine with the address of the run does.
        options: those that are given of ``last_call_timeout``, ``join_timeout``, ``keep_alive_interval`` (seconds) and
            ``keep_alive_max_attempt``, which mean what they do to torch's agent, and ``return_delay``, the seconds that
            a machine waits which is lost again and again.
    """

    least_machines: int
    is_numbered: bool
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchOptions:
    """The flags of ``accelerate-cpp launch`` as they were given; ``None`` for flags that were not."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    cpu: bool = False
    multi_gpu: bool = False
    tpu: bool = False
    tpu_use_cluster: bool | None = None
    tpu_use_sudo: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_env: list[str] | None = None
    main_training_function: str | None = None
    downcast_bf16: bool = False
    num_processes: int | None = None
    num_machines: int | None = None
    least_machines: int | None = None
    elastic_lr: str = "linear"
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    same_network: bool = False
    mpirun_hostfile: str | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str = ""
    role: str = "default"
    num_cpu_threads_per_process: int | None = None
    mixed_precision: str | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool = False
    dynamo_use_dynamic: bool = False
    dynamo_use_regional_compilation: bool = False
    gradient_accumulation_steps: int | None = None
    gpu_ids: str | None = None
    module: bool = False
    no_python: bool = False
    debug: bool = False
    enable_cpu_affinity: bool = False
    config_file: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    report: str | None = None
    ends_with_stdin: bool = False
    monitor: bool = False
    alias: bool = False
    fp8: Mapping[str, Any] = field(default_factory=dict)
    sharding: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_hostfile: str | None = None
    deepspeed_exclusion_filter: str | None = None
    deepspeed_inclusion_filter: str | None = None
    deepspeed_multinode_launcher: str | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch does.

    Attributes:
        command: the command of every worker.
        group: the settings that the workers get.
        settings: all settings with their sources.
        max_restarts: how often all workers are started again after a failure.
        logs: which output goes to files.
        report: the file for the report.
        mpirun: the file with the machines on which MPI has to start this launch first.
        agent: torch's agent, if it supervises the workers instead of this launcher.
        elastic: how the run goes on with fewer machines, if it may, and torch's agent does not see to that.
        deepspeed: DeepSpeed's launcher, if it starts the workers instead of this one, by ``deepspeed_command``.
        ends_with_stdin: whether the run ends when standard input ends, which the workers then do not get.
        monitor: whether the progress of the workers is shown.
        tpus: how torch_xla starts the workers, on TPUs.
    """

    command: tuple[str, ...]
    group: WorkerGroup
    settings: Mapping[str, Setting] = field(default_factory=dict)
    max_restarts: int = 0
    logs: Logs = field(default_factory=Logs)
    report: Path | None = None
    mpirun: Path | None = None
    agent: Agent | None = None
    elastic: ElasticRun | None = None
    deepspeed: DeepSpeedLauncher | None = None
    deepspeed_command: tuple[str, ...] = ()
    ends_with_stdin: bool = False
    monitor: bool = False
    tpus: TpuLaunch | None = None


def resolve(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """The plan for ``options`` under ``environ`` (default ``os.environ``), or :class:`InvalidArgument`."""
    command = _command(options, os.environ if environ is None else environ)
    if options.alias:
        _require_alias_file()
    group, settings = resolve_group(options, environ)
    if group.trains_through_deepspeed:
        _require_deepspeed(options, os.environ if environ is None else environ)
    tpus = tpu_launch(options, settings, group)
    logs = _logs(options, group.num_processes)
    theirs = deepspeed_launcher(settings) if group.trains_through_deepspeed else None
    agent = _agent(options, group.launchers, settings) if theirs is None else None
    for flag, is_given, does in (
        ("--monitor", options.monitor, "shows"),
        ("--report", options.report is not None, "tells of"),
    ):
        if is_given and agent is not None:
            raise InvalidArgument(
                f"{flag} only {does} workers that this launcher supervises, but here torch's agent supervises them "
                f"({agent.rdzv_backend}); leave out {flag}, or --max_restarts and --rdzv_backend (or rdzv_backend in "
                "the configuration file)"
            )
    beside_logs = logs.folder / "report.json" if logs.folder and agent is None else None
    return LaunchPlan(
        command,
        group,
        settings,
        max_restarts=options.max_restarts,
        logs=logs,
        report=Path(options.report) if options.report else beside_logs,
        mpirun=_mpirun(settings, os.environ if environ is None else environ),
        agent=agent,
        elastic=None if options.least_machines is None or agent is not None else _elastic(options, group, settings),
        deepspeed=theirs,
        deepspeed_command=() if theirs is None else _deepspeed_command(theirs, group, options, command),
        ends_with_stdin=options.ends_with_stdin,
        monitor=options.monitor,
        tpus=tpus,
    )


_MOST_SECONDS = 1e6
_ELASTIC_OPTIONS = (
    "last_call_timeout",
    "join_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "return_delay",
)


def _elastic(options: LaunchOptions, group: WorkerGroup, settings: Mapping[str, Setting]) -> ElasticRun:
    """How a run goes on with fewer machines; :class:`InvalidArgument` if it cannot."""
    assert options.least_machines is not None
    said = f"--num_machines {options.least_machines}:{options.num_machines}"
    if group.trains_through_deepspeed:
        raise InvalidArgument(
            f"{said}: engines of DeepSpeed fix the samples of a step for their number of processes, so that a run "
            "through DeepSpeed cannot go on with fewer; give one number of machines, or train with --use_fsdp"
        )
    if settings["mpirun_hostfile"].value is not None:
        raise InvalidArgument(
            f"{said}: MPI ends all processes when one is lost; start this launcher on each machine without "
            "--mpirun_hostfile"
        )
    given: dict[str, float] = {}
    for part in filter(None, options.rdzv_conf.split(",")):
        name, _, text = part.partition("=")
        try:
            given[name.strip()] = float(text)
        except ValueError:
            given[name.strip()] = 0.0
        if name.strip() not in _ELASTIC_OPTIONS or not 0 < given[name.strip()] <= _MOST_SECONDS:
            raise InvalidArgument(
                f"--rdzv_conf {part!r}: with {said} expected {', '.join(_ELASTIC_OPTIONS)}, each with a number above "
                f"0 and up to {_MOST_SECONDS:.0f}; options of torch's rendezvous need --rdzv_backend c10d"
            )
    numbered = settings["machine_rank"].source != DEFAULT or group.launchers.source != settings["num_machines"].source
    return ElasticRun(options.least_machines, numbered, given)


def _require_alias_file() -> None:
    """Workers without it would import the original, or nothing."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    if not any((Path(folder) / _ALIAS_FILE).is_file() for folder in folders):
        raise InvalidArgument(
            f"--alias needs {_ALIAS_FILE} in one of {', '.join(folders)}; pip installs it with this package: install "
            "the package there, or put `import accelerate_cpp.compat` at the beginning of the script"
        )


def _deepspeed_command(
    launcher: DeepSpeedLauncher, group: WorkerGroup, options: LaunchOptions, command: tuple[str, ...]
) -> tuple[str, ...]:
    """The command of DeepSpeed's launcher, whose workers run ``command``."""
    if launcher.way in WITHOUT_RANKS:
        from accelerate_cpp.launch.workers import exec_with_rank  # here, as few launches go this way

        return tuple(launcher.command(group.master_port, (exec_with_rank.__file__, *command)))
    return tuple(
        launcher.command(
            group.master_port,
            (options.training_script, *options.training_script_args),
            module=options.module,
            no_python=options.no_python,
        )
    )


def _require_deepspeed(options: LaunchOptions, environ: Mapping[str, str]) -> None:
    if has_code("deepspeed"):
        return
    _, source = kind_of_training(environ, config_file.find(options.config_file, environ), options.sharding) or (
        None,
        "",
    )
    raise MissingLibrary(
        f"{source}: expected DeepSpeed to be installed for {sys.executable}, but it is not: pip install deepspeed"
    )


def _agent(options: LaunchOptions, launchers: Launchers, settings: Mapping[str, Setting]) -> Agent | None:
    """Torch's agent, if several machines have to agree on which of them take part."""
    backend = settings["rdzv_backend"].value
    ours = options.max_restarts == 0 or options.least_machines is not None
    if launchers.count == 1 or (backend == "static" and ours):
        return None
    # With a rendezvous, the flags may be the same on all machines.
    numbered = settings["num_machines"].value == 1 or settings["machine_rank"].source != DEFAULT
    return Agent(
        # Machines of a static rendezvous do not learn of each other's restarts.
        "c10d" if backend == "static" else backend,
        options.rdzv_conf,
        options.role,
        options.max_restarts,
        options.monitor_interval,
        options.tee,
        is_host=launchers.rank == 0 if numbered else None,
        least_machines=options.least_machines,
    )


def resolve_group(
    options: LaunchOptions, environ: Mapping[str, str] | None = None
) -> tuple[WorkerGroup, dict[str, Setting]]:
    """The settings of the workers of a launch, whatever they run, and their sources."""
    environ = os.environ if environ is None else environ
    given = [f"--{name}" for name in ("cpu", "multi_gpu", "tpu") if getattr(options, name)]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)} exclude each other: pass one of them")
    file = config_file.find(options.config_file, environ)
    settings = resolved(options, environ, file)
    said = {name: setting.value for name, setting in settings.items()}
    # A flag takes precedence over the file.
    cpu = said["cpu"] and not (options.multi_gpu or options.tpu)
    gpu_ids = _gpu_ids(said["gpu_ids"], cpu)
    visible = environ if gpu_ids is None else {**environ, "CUDA_VISIBLE_DEVICES": gpu_ids}
    sharded = sharding(environ, file, options.sharding, settings)
    theirs = deepspeed_launcher(settings) if sharded.get(env_table.USE_DEEPSPEED) else None
    launchers = _launchers(settings, environ) if theirs is None else theirs.launchers
    workers = _workers_of_launcher(settings, launchers, cpu, visible) if theirs is None else theirs.most
    shares = shares_of_launch(workers, visible, on_gpus=not cpu) if said["enable_cpu_affinity"] else ()
    group = WorkerGroup(
        num_processes=workers,
        cpu=cpu,
        mixed_precision=said["mixed_precision"],
        num_threads=threads_per_worker(workers, said["num_cpu_threads_per_process"], environ, shares),
        master_addr=launchers.address or "",
        master_port=said["main_process_port"] or launchers.port or host_resources.free_port(),
        debug=said["debug"],
        gradient_accumulation_steps=said["gradient_accumulation_steps"],
        gpu_ids=gpu_ids,
        shares=shares,
        fp8=fp8_recipe(environ, file, options.fp8) if said["mixed_precision"] == "fp8" else {},
        sharding=sharded,
        compiler=compiler(settings),
        launchers=launchers,
        alias=options.alias,
        downcast_bf16=said["downcast_bf16"],
        elastic=None if options.least_machines is None else ElasticSteps(workers * launchers.count, options.elastic_lr),
    )
    effective = {
        "cpu": cpu,
        "tpu": said["tpu"] and not (cpu or options.multi_gpu),
        "num_processes": group.world_size,
        "num_cpu_threads_per_process": group.num_threads,
    }
    return group, settings | {name: replace(settings[name], value=value) for name, value in effective.items()}


def _launchers(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> Launchers:
    """The rank of this launcher and the number of launchers: from flags or the file, else as detected."""
    machines, rank, address = settings["num_machines"], settings["machine_rank"], settings["main_process_ip"].value
    mpirun = _mpirun(settings, environ)
    if mpirun is not None:
        from accelerate_cpp.launch.workers.over_mpi import launchers_to_come  # here, as few launches go this way

        # A file has 1 by default; a flag is explicit.
        is_said = machines.value > 1 or machines.source == "--num_machines"
        return launchers_to_come(mpirun, machines.value if is_said else None, address)
    if machines.value > 1:
        launchers = Launchers(machines.value, rank.value, port=DEFAULT_PORT, source=machines.source)
        found = ALONE if rank.source == "--machine_rank" else find_launchers(environ)
        if found.count == launchers.count:  # a file that all machines share cannot say which of them this is
            launchers = found
    else:
        if rank.value != 0:
            raise InvalidArgument(f"machine_rank is {rank.value} ({rank.source}): with one machine the only rank is 0")
        is_alone = machines.source == "--num_machines"
        launchers = ALONE if is_alone else find_launchers(environ)
        if launchers is ALONE and not is_alone:
            refuse_batch_job(environ)
    launchers = replace(launchers, address=address or launchers.address)
    if launchers.address is None:
        raise InvalidArgument(
            f"{launchers.count} machines ({launchers.source}), but the address of rank 0 is unknown: pass "
            "--main_process_ip with the address of that machine"
        )
    return launchers


def _mpirun(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> Path | None:
    """The file with the machines on which MPI has to start this launch; ``None`` when it has, or need not."""
    path = settings["mpirun_hostfile"].value
    return None if path is None or started_by_mpi(environ) else Path(path)


def _workers_of_launcher(
    settings: Mapping[str, Setting], launchers: Launchers, cpu: bool, visible: Mapping[str, str]
) -> int:
    setting, multi_gpu = settings["num_processes"], settings["multi_gpu"]
    total = setting.value
    if total is None:
        alone_here = launchers.local_count == 1
        each = launchers.workers_each or (1 if cpu or not alone_here else max(1, host_resources.gpu_count(visible)))
        total = each * launchers.count
    if total < 1:
        raise InvalidArgument(
            f"num_processes is {total} ({setting.source}), and must be at least 1: pass --num_processes"
        )
    if total % launchers.count:
        raise InvalidArgument(
            f"num_processes is {total} ({setting.source}); it counts the processes of all machines and cannot be "
            f"divided evenly among {launchers.count} machines ({launchers.source}); pass a multiple of "
            f"{launchers.count}"
        )
    if multi_gpu.value and not cpu and total < 2:
        raise InvalidArgument(
            f"multi_gpu ({multi_gpu.source}) needs at least 2 processes, but this launch has {total}: "
            "pass --num_processes, or leave --multi_gpu out"
        )
    return int(total // launchers.count)


def _logs(options: LaunchOptions, num_workers: int) -> Logs:
    """Each run has its own folder, so that no run writes into the files of another; nobody can make it before."""
    streams = parse_tee(options.tee, num_workers)
    if options.log_dir is None:
        return Logs(None, streams)
    run = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}_{os.urandom(4).hex()}"
    return Logs(Path(options.log_dir) / run, streams if any(streams) else (STDOUT | STDERR,) * num_workers)


def _gpu_ids(gpu_ids: str | None, cpu: bool) -> str | None:
    """The text for ``CUDA_VISIBLE_DEVICES``, or ``None`` to leave it as it is."""
    if gpu_ids is None or gpu_ids.strip() == "all" or cpu:
        return None
    entries = [entry.strip() for entry in gpu_ids.split(",")]
    if not all(entries):
        raise InvalidArgument(f"gpu_ids {gpu_ids!r}: expected 'all' or ids separated by commas, such as 0,1")
    return ",".join(entries)


def _command(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    script, arguments = options.training_script, options.training_script_args
    if options.module and options.no_python:
        raise InvalidArgument("--module and --no_python exclude each other: pass one of them")
    if options.no_python:
        import shutil  # here, as few launches look for a program

        program = shutil.which(script, path=environ.get("PATH"))
        if program is None:
            raise InvalidArgument(f"--no_python: no executable {script!r} here or in PATH")
        return (program, *arguments)
    if options.module:
        return (sys.executable, "-m", script, *arguments)
    if not Path(script).exists():
        raise InvalidArgument(f"there is no script {script!r} in {Path.cwd()}{_script_meant(Path(script))}")
    return (sys.executable, script, *arguments)


def _script_meant(script: Path) -> str:
    """``"; did you mean …?"``, if there is a script of a similar name in the same folder, or of the same name below."""
    folder = script.parent
    if not folder.is_dir():
        return ""
    from difflib import get_close_matches  # here, as most launches find their script

    beside = {path.stem: path for path in folder.glob("*.py")}
    nearest = [beside[stem] for stem in get_close_matches(script.stem, beside, 1)] or [*folder.glob(f"*/{script.name}")]
    return f"; did you mean {nearest[0]}?" if nearest else ""


# Flags of a launch that no script is known to have.
_ONLY_OF_LAUNCHES = frozenset(
    {
        *("num_processes", "multi_gpu", "gpu_ids", "num_cpu_threads_per_process", "enable_cpu_affinity"),
        *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "mpirun_hostfile"),
        *("rdzv_backend", "max_restarts"),
    }
)


def remarks(plan: LaunchPlan, options: LaunchOptions) -> Iterator[str]:
    """Sentences about what is probably not meant, though it can be done."""
    script = options.training_script
    for argument in options.training_script_args:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in _ONLY_OF_LAUNCHES and not _is_named_in(Path(script), name):
            yield f"{flag} stands after {script}, so the script gets it; if the launch is meant, put it before {script}"
    yield from _remarks_on_deepspeed(plan, options)
    yield from remarks_on_tpus(plan.tpus, options)
    if plan.tpus is not None:
        return
    workers, cores = plan.group.num_processes, host_resources.usable_cores()
    if workers > cores and not plan.settings["enable_cpu_affinity"].value:  # which has a sentence of its own
        yield (
            f"{workers} processes share {cores} core{'s' * (cores > 1)}: to start, and each step, takes about "
            f"{workers / cores:.2g} times as long as with a core for each; --num_processes {cores} is no slower here"
        )


def _remarks_on_deepspeed(plan: LaunchPlan, options: LaunchOptions) -> Iterator[str]:
    if plan.deepspeed is None:
        if options.deepspeed_hostfile is not None and plan.group.trains_through_deepspeed:
            yield (
                "--deepspeed_hostfile has no effect: this launcher starts the workers, as there is one machine or "
                "--deepspeed_multinode_launcher is standard"
            )
        return
    of_own_workers = ("log_dir", "report", "monitor", "max_restarts", "rdzv_backend")
    names = [name for name in of_own_workers if getattr(options, name)] + ["tee"] * (options.tee != "0")
    if names:
        yield (
            f"{', '.join(f'--{name}' for name in names)}: no effect, as DeepSpeed's launcher starts the workers; with "
            "--deepspeed_multinode_launcher standard, one of this package on each machine does"
        )


def _is_named_in(script: Path, flag: str) -> bool:
    try:
        return flag in script.read_text(errors="replace").replace("-", "_")
    except OSError:  # a module, a program, or a folder
        return False
