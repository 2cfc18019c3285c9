"""DeepSpeed itself: loaded once, on the kind of device of the run, over the process group that exists."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from accelerate_cpp.comm.topology import process_index
from accelerate_cpp.config import env_table
from accelerate_cpp.config.libraries import is_installed
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

__all__ = ["OLDEST", "joined_library", "require_library"]

OLDEST = "0.19"
"""The oldest version of DeepSpeed that is used."""
_SHARED_MEMORY_OPERATOR = "deepspeed_shm_comm"


def require_library(found: str) -> None:
    """Raises ``MissingLibrary`` unless DeepSpeed is installed; ``found`` is what asks for it."""
    if not is_installed("deepspeed", at_least=OLDEST):
        raise MissingLibrary(
            f"{found}: training through DeepSpeed needs DeepSpeed {OLDEST} or newer; pip install deepspeed"
        )


def joined_library(device: torch.device) -> Any:
    """The module ``deepspeed``, whose collectives run in torch's default process group.

    Raises:
        MissingLibrary: it is not installed.
        InvalidArgument: it was loaded before, for another kind of device.
    """
    require_library("DeepSpeedPlugin")
    if device.type == "cpu" and env_table.DS_ACCELERATOR.get() is None:
        env_table.export({env_table.DS_ACCELERATOR: "cpu"})  # it would look for other devices
    if env_table.LOCAL_RANK.get() is None:
        env_table.export({env_table.LOCAL_RANK: process_index()})  # which it insists on; without a launcher, one host
    library = importlib.import_module("deepspeed")
    kind = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if kind != device.type:
        raise InvalidArgument(
            f"DeepSpeed computes on {kind!r}, but this process on {str(device)!r}; set "
            f"{env_table.DS_ACCELERATOR.name}={device.type} before the program starts"
        )
    # Its operator for CPUs would be compiled for a minute, and leaves segments behind; the group has shared memory.
    library.ops.__compatible_ops__[_SHARED_MEMORY_OPERATOR] = False
    library.comm.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    warnings.filterwarnings(  # it calls these in each step, and nobody here can change that
        "ignore",
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        FutureWarning,
    )
    return library
