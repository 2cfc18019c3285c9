"""Environment variables for a while, what they say, and pinning this process to its share of the cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.affinity import pin_process
from accelerate_cpp.runtime import current

__all__ = [
    "clear_environment",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "set_numa_affinity",
    "str_to_bool",
]

_logger = logging.getLogger(__name__)


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """1 for ``y yes t true on 1`` and 0 for ``n no f false off 0``, in any case; ``ValueError`` for other texts.

    With ``to_bool``, ``True`` and ``False``.
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
    """Within it these variables, in upper case, have these values as texts."""
    return env_table.replaced_environment({name.upper(): str(value) for name, value in kwargs.items()})


def clear_environment() -> AbstractContextManager[None]:
    """Within it there are no environment variables; what is set there is forgotten."""
    return env_table.replaced_environment({}, clear=True)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pins every thread of this process to its share of the cores, also when it is pinned already.

    The processes of a host share its cores out: each gets as many as the others and none gets another's. A process that
    trains on a GPU gets cores of the NUMA node that its GPU is attached to, where Linux tells it. Warns, and pins
    nothing, where there are fewer cores than processes, and on systems other than Linux.

    Args:
        local_process_index: rank of this process among those of its host, whose number is ``LOCAL_WORLD_SIZE``.
        verbose: log the cores at level INFO; ``None`` does so with ``ACCELERATE_DEBUG_MODE``.

    Raises:
        InvalidArgument: ``local_process_index`` is not a rank on this host.
        SystemFailure: the system refuses.
    """
    session = current.session
    if session is None:
        workers, on_gpus = int(env_table.LOCAL_WORLD_SIZE.get() or 1), not env_table.USE_CPU.get()
    else:
        workers, on_gpus = session.topology.local_world_size, session.device.type == "cuda"
    share = pin_process(local_process_index, workers, on_gpus=on_gpus)
    if env_table.DEBUG_MODE.get() if verbose is None else verbose:
        cores = env_table.render_cores(share) if share else "none"
        _logger.info("CPU affinity: local process %d is pinned to cores %s", local_process_index, cores)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """As :func:`override_numa_affinity`, but the same call does nothing the second time."""
    _pin_once(os.getpid(), local_process_index, verbose)


@cache
def _pin_once(pid: int, local_process_index: int, verbose: bool | None) -> None:
    """A fork is another process: it inherits what was called, but has a share of its own."""
    override_numa_affinity(local_process_index, verbose)
