"""Which process is the main one, for trackers: experiments are logged once, not once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from accelerate_cpp.config import env_table

Function = TypeVar("Function", bound=Callable[..., Any])


def is_main_process() -> bool:
    """Whether this is the process of rank 0: by the process group, and before there is one by the environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return (env_table.WORLD_SIZE.get() or 1) <= 1 or (env_table.RANK.get() or 0) == 0


def on_main_process(function: Function) -> Function:
    """Makes a method of a tracker run on the main process only; elsewhere it returns ``None``.

    Where the tracker's ``main_process_only`` is ``False``, or where it has no such attribute, the method runs on every
    process. Which process it is, is asked at each call.
    """

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not is_main_process():
            return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]
