"""Launching a training function from a notebook or a script: the workers are forked from this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.launch.environment import exported
from accelerate_cpp.launch.forked import function_group, run_forked
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation

_DEFAULT_PORT = "29500"


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = _DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Runs ``function(*args)`` in ``num_processes`` workers forked from this process, and returns when all have ended.

    Args:
        function: any callable, also one defined in a cell, a closure or a lambda; nothing is pickled.
        args: positional arguments of ``function``.
        num_processes: ``None`` means one per visible GPU, or 1 without GPUs; 1 runs ``function`` in this process.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; default of every ``Accelerator`` of the workers.
        use_port: value of MASTER_PORT in the workers. They meet through a memory file and need no port, so the default
            becomes a free one, and several launches can run at once.
        master_addr: value of MASTER_ADDR in the workers.
        node_rank: only 0.
        num_nodes: only 1.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: without effect on one machine.
        max_restarts: only 0.
        monitor_interval: without effect; the end of a worker is noticed at once.
        log_line_prefix_template: only ``None``.

    What workers print appears live in ``sys.stdout`` and ``sys.stderr`` of this process, so in the cell. If one fails,
    the others are ended and :class:`accelerate_cpp.launch.failure.WorkerFailed`, a RuntimeError with that worker's
    traceback in its message, is raised. An interrupt ends all workers and raises KeyboardInterrupt. No worker is left
    in any case.

    Raises:
        InvalidArgument: an argument has a value that is not supported, or this process already has a process group.
        AccelerateError: CUDA is initialised in this process; a fork of it could not use the GPU.
        WorkerFailed: a worker raised or died.
    """
    _refuse_unsupported(node_rank, num_nodes, max_restarts, log_line_prefix_template)
    port = None if use_port == _DEFAULT_PORT else _port(use_port)
    group = function_group(
        num_processes, mixed_precision=_precision(mixed_precision), master_addr=master_addr, master_port=port
    )
    if group.num_processes == 1:
        with exported({env_table.MIXED_PRECISION: group.mixed_precision}):
            function(*args)
        return
    _refuse_state_that_forks_cannot_use()
    run_forked(_WorkerTask(function, args, group.num_threads), group)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Runs ``function(*args)`` in ``num_processes`` forked workers that use only the CPU; otherwise as the above."""
    group = function_group(num_processes, cpu=True)
    _refuse_existing_group()
    run_forked(_WorkerTask(function, args, group.num_threads), group)


class _WorkerTask:
    """What a forked worker runs: the user's function, in a process that has forgotten its parent's session."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], num_threads: int) -> None:
        self._function = function
        self._args = args
        self._num_threads = num_threads

    def __call__(self) -> None:
        current.session = None
        current.accumulation = Accumulation()
        torch = sys.modules.get("torch")
        if torch is not None:  # torch read OMP_NUM_THREADS when the parent imported it
            torch.set_num_threads(self._num_threads)
        self._function(*self._args)


def _precision(asked: str) -> str | None:
    """The precision that was asked for; ``None``, which leaves it to the environment, for ``"no"``, the default."""
    precision = str(asked).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise InvalidArgument(f"mixed_precision={asked!r} is not supported: expected 'no', 'fp16', 'bf16' or 'fp8'")
    return None if precision == "no" else precision


def _refuse_unsupported(
    node_rank: int, num_nodes: int, max_restarts: int, log_line_prefix_template: str | None
) -> None:
    if num_nodes != 1 or node_rank != 0:
        raise InvalidArgument(
            f"num_nodes={num_nodes}, node_rank={node_rank}: notebook_launcher starts workers on one machine only "
            "(num_nodes=1, node_rank=0); for several machines start a script with torchrun on each"
        )
    if max_restarts != 0:
        raise InvalidArgument(f"max_restarts={max_restarts}: failed workers are not restarted; expected 0")
    if log_line_prefix_template is not None:
        raise InvalidArgument("log_line_prefix_template is not supported: output is forwarded unchanged; expected None")


def _port(text: str | int) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"use_port={text!r}: expected a port number from 0 to 65535")
    return port


def _refuse_state_that_forks_cannot_use() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise AccelerateError(
            "CUDA is already initialised in this process, and a forked worker cannot use it. Restart the kernel, and "
            "use no CUDA tensor or torch.cuda call before notebook_launcher; make them inside the training function"
        )
    _refuse_existing_group()


def _refuse_existing_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise InvalidArgument(
            f"process {os.getpid()} already belongs to a process group of {distributed.get_world_size()}; create the "
            "Accelerator only inside the launched function, and call torch.distributed.destroy_process_group() or "
            "restart the kernel first"
        )
