"""Setting and reading environment variables, finding hardware, and pinning this process to its cores."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from accelerate_cpp.config import env_table
from accelerate_cpp.devices.affinity import pin_process
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.plugins.enums import type_of_several_processes
from accelerate_cpp.runtime import current
from accelerate_cpp.utils.imports import available_device_type

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]

_logger = logging.getLogger(__name__)
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_PREFIX = "ACCELERATE_"
# From this driver version on, cards report correctly that they have no links between them.
_DRIVER_OF_RTX_40 = "550.40.07"


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """1 for ``y yes t true on 1`` and 0 for ``n no f false off 0``, in upper or lower case; ``ValueError`` otherwise.

    With ``to_bool``, it returns ``True`` and ``False``.
    """
    flag = env_table.parse_flag(value)
    return flag if to_bool else int(flag)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is not negative, or ``default``."""
    values = (int(text) for name in env_keys if (text := env_table.raw(name)) is not None)
    return next((value for value in values if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable as :func:`str_to_bool` reads it, or ``default``."""
    text = env_table.raw(key)
    return default if text is None else bool(str_to_bool(text))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of the variable, or ``default``."""
    text = env_table.raw(key)
    return str(default) if text is None else text


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Inside this block, these variables, in upper case, have these values as strings."""
    return env_table.replaced_environment({name.upper(): str(value) for name, value in kwargs.items()})


def clear_environment() -> AbstractContextManager[None]:
    """Inside this block there are no environment variables; variables that are set inside are dropped."""
    return env_table.replaced_environment({}, clear=True)


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Decorates a function or a class of tests: afterwards all variables ``ACCELERATE_…`` are as they were before.

    Args:
        func_or_cls: a function, a coroutine function or a generator function, which is returned wrapped; or a class,
            which is returned itself, with all methods wrapped whose names begin with ``test``, also those of
            subclasses. In a ``unittest.TestCase``, variables that ``setUp`` sets are also visible in its test.
    """
    if inspect.isclass(func_or_cls):
        _purge_after_tests(func_or_cls)
        return cast(_Decorated, func_or_cls)
    wrapped: Callable[..., Any]
    if inspect.iscoroutinefunction(func_or_cls):

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with env_table.restored_environment(_PREFIX):
                return await func_or_cls(*args, **kwargs)

    elif inspect.isgeneratorfunction(func_or_cls):

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with env_table.restored_environment(_PREFIX):
                return (yield from func_or_cls(*args, **kwargs))

    else:

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with env_table.restored_environment(_PREFIX):
                return func_or_cls(*args, **kwargs)

    return cast(_Decorated, functools.wraps(func_or_cls)(wrapped))


def _purge_after_tests(tests: Any) -> None:
    def wrap_own(cls: Any) -> None:
        for name, value in list(vars(cls).items()):
            if name.startswith("test") and inspect.isfunction(value):
                setattr(cls, name, purge_accelerate_environment(value))

    def wrap_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(tests, cls).__init_subclass__(**kwargs) if own is None else own.__get__(None, cls)(**kwargs)
        wrap_own(cls)

    own = vars(tests).get("__init_subclass__")
    tests.__init_subclass__ = classmethod(wrap_subclass)
    wrap_own(tests)
    if issubclass(tests, unittest.TestCase):  # its ``run`` calls setUp, the test and tearDown
        tests.run = purge_accelerate_environment(tests.run)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """A line ``NAME=value`` for each variable, as in an environment file.

    Skips, with a warning, names and values that such a file cannot hold: empty ones, and those that contain a space, a
    line's end, or one of ``; < >``.
    """
    lines = []
    for name, text in current_env.items():
        if name and text and not any(character in name + text for character in ";\n<> "):
            lines.append(f"{name}={text}\n")
        else:
            _logger.warning(
                "Skipping %s=... as it contains forbidden characters or missing values: one of `; < >`, a space or a "
                "line's end, or nothing at all",
                name,
            )
    return lines


@dataclass
class CPUInformation:
    """The rank of this process and the number of processes, over all machines and on its own.

    Attributes:
        rank: the rank among all processes, from 0.
        world_size: the number of all processes.
        local_rank: the rank among the processes of this machine, from 0.
        local_world_size: the number of processes of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Reads the variables of torchrun, MPI, Open MPI or MVAPICH; without them there is one process."""
    of_mpi = ("OMPI_COMM_WORLD_{}", "MV2_COMM_WORLD_{}")
    number_of = {"rank": "RANK", "world_size": "SIZE", "local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_SIZE"}
    hydra = {"rank": "PMI_RANK", "world_size": "PMI_SIZE"}  # MPICH and Intel MPI
    hydra |= {"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"}
    alone = CPUInformation()
    return CPUInformation(
        **{
            field: get_int_from_env(
                [field.upper(), hydra[field], *(prefix.format(name) for prefix in of_mpi)], getattr(alone, field)
            )
            for field, name in number_of.items()
        }
    )


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The modules among these that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """The kind of accelerator here, ``"cpu"`` without one, and the name of a run of several processes on it."""
    kind = available_device_type()
    return kind, type_of_several_processes(kind).value


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the NVIDIA GPUs of this machine, visible or not; the driver is not initialised.

    Raises:
        SystemFailure: nvidia-smi, which is called, fails.
    """
    rows = [line.split(",", 1) for line in _asked_of_nvidia_smi("count,name")]
    return [name.strip() for _, name in rows], len(rows)


def get_driver_version() -> str | None:
    """The version of NVIDIA's driver, such as ``"550.54.14"``; ``None`` without its GPUs.

    Raises:
        SystemFailure: nvidia-smi, which is called, fails.
    """
    return next(iter(_asked_of_nvidia_smi("driver_version")), None)


def _asked_of_nvidia_smi(query: str) -> list[str]:
    """A line for each GPU; none without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise SystemFailure(f"nvidia-smi --query-gpu={query}: exit status {done.returncode}: {said}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may use links between GPUs here.

    ``False`` if there are several cards of the RTX 40 series and a driver older than 550.40.07, which reports links
    between them although there are none. Then ``NCCL_P2P_DISABLE=1`` and ``NCCL_IB_DISABLE=1`` keep runs from hanging.

    Raises:
        SystemFailure: nvidia-smi, which is called, fails.
    """
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    from packaging.version import Version

    driver = get_driver_version()
    return driver is not None and Version(driver) >= Version(_DRIVER_OF_RTX_40)


def check_cuda_fp8_capability() -> bool:
    """Whether there is a current GPU that supports fp8, that is, has compute capability 8.9 or higher."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pins every thread of this process to its share of the cores, even if it is already pinned.

    The cores of a host are divided among its processes: each gets equally many, and no core is shared. A process that
    trains on a GPU gets cores of the NUMA node that its GPU is attached to, if Linux reports it. If there are fewer
    cores than processes, and on systems other than Linux, it warns and pins nothing.

    Args:
        local_process_index: rank of this process among those of its host, whose number is ``LOCAL_WORLD_SIZE``.
        verbose: log the cores at level INFO; ``None`` does so with ``ACCELERATE_DEBUG_MODE``.

    Raises:
        InvalidArgument: ``local_process_index`` is not a rank on this host.
        SystemFailure: the system refuses.
    """
    session = current.session
    if session is None:
        workers, kind = int(env_table.LOCAL_WORLD_SIZE.get() or 1), "cpu" if env_table.USE_CPU.get() else "cuda"
    else:
        workers, kind = session.topology.local_world_size, session.device.type
    share = pin_process(local_process_index, workers, nodes=kind_of(kind).numa_nodes)
    if env_table.DEBUG_MODE.get() if verbose is None else verbose:
        cores = env_table.render_cores(share) if share else "none"
        _logger.info("CPU affinity: local process %d is pinned to cores %s", local_process_index, cores)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Like :func:`override_numa_affinity`, but repeating the same call has no effect."""
    _pin_once(os.getpid(), local_process_index, verbose)


@cache
def _pin_once(pid: int, local_process_index: int, verbose: bool | None) -> None:
    """A fork is another process: it inherits the record of calls, but has its own share."""
    override_numa_affinity(local_process_index, verbose)
