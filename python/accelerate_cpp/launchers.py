"""Launching a training function from a notebook or a script.

The workers are forked from this process or, if its forks could not use the GPU, from a separate helper process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.launch.fork import first_gpu_use as first_use
from accelerate_cpp.launch.fork.captured_variables import variables_reached
from accelerate_cpp.launch.fork.forked import Parent, Supervision, run_forked
from accelerate_cpp.launch.fork.forked_plan import (
    function_group,
    obstacle_to_forks,
    processes_of_notebook,
    runs_on_tpus,
)
from accelerate_cpp.launch.fork.kernel_messages import sender
from accelerate_cpp.launch.fork.results import result_files, values_of
from accelerate_cpp.launch.fork.tpu import run_on_tpus
from accelerate_cpp.launch.plan.environment import WorkerGroup, exported
from accelerate_cpp.launch.plan.machines import ALONE, DEFAULT_PORT, Launchers
from accelerate_cpp.launch.view.notebook_cells import cell_display
from accelerate_cpp.launch.workers.program import open_standard_streams
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation

__getattr__ = lending("launchers")

_IMPORTED_BY_THE_FORK_SERVER = ("torch", "accelerate_cpp.accelerator", "accelerate_cpp.launchers")

first_use.watch()


def _check_call(launcher: str, function: object, args: object) -> None:
    """Raises ``InvalidArgument``, with what was probably meant, unless ``function(*args)`` is a call."""
    if not callable(function):
        raise InvalidArgument(
            f"{launcher}: expected a function, found {type(function).__name__}. Pass the function and its arguments, "
            f"{launcher}(train, args=(1,)), without calling it: not {launcher}(train(1))"
        )
    if not isinstance(args, tuple | list):
        raise InvalidArgument(
            f"{launcher}: args has to be a tuple or a list of arguments, found {type(args).__name__}. A tuple of one "
            "has a comma: args=(1,)"
        )


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = str(DEFAULT_PORT),
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
) -> list[Any] | None:
    """Runs ``function(*args)`` in ``num_processes`` workers, and returns what they returned when all have ended.

    Args:
        function: any callable, also one defined in a cell, a closure or a lambda.
        args: positional arguments of ``function``.
        num_processes: the number of workers on this machine. ``None`` means one per visible GPU, else one per TPU, else
            1; 1 runs ``function`` in this process, unless it may be restarted or other machines take part. On TPUs any
            other number means all of them; in Colab with one GPU or none, any number means 1.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; the default for every ``Accelerator`` in the
            workers.
        use_port: value of MASTER_PORT in the workers. On one machine they connect through a memory file and need no
            port, so a free port replaces the default, and several launches can run at once.
        master_addr: value of MASTER_ADDR in the workers: where the machine with rank 0 is.
        node_rank: the number of this machine, from 0.
        num_nodes: the number of machines; each makes the same call with its own ``node_rank``.
        rdzv_backend: ``"static"``; others are refused for several machines.
        rdzv_endpoint: ``host:port`` in place of ``master_addr`` and ``use_port`` for several machines.
        rdzv_conf, rdzv_id: without effect.
        max_restarts: how often all workers are started again after one has failed, on one machine.
            :meth:`accelerate_cpp.Accelerator.resume` continues from the last checkpoint.
        monitor_interval: without effect; the end of a worker is noticed at once.
        log_line_prefix_template: printed before each line of a worker; may contain ``${role_name}`` (``default``),
            ``${rank}`` and ``${local_rank}``. ``None`` prints lines unchanged. Without effect on TPUs and for a
            function that runs in this process.

    Returns:
        A list of what ``function`` returned, by rank on this machine, or ``None`` if it returned nothing. Tensors of
        workers arrive on the CPU. A value that cannot be pickled is ``None`` in the list, with a warning.

    The workers are forks of this process: they start in milliseconds and see all its variables. If this process has
    used a GPU, its forks cannot use one; a warning then names the call that used it. Then the workers are forks of a
    helper process that the first such call starts; the function and what it uses are copied there. An ``Accelerator``
    may exist here already, but workers have to create their own.

    In a notebook, a run of several seconds shows the progress of each worker in the cell, and which one is slower than
    the others; ACCELERATE_CPP_LIVE_VIEW=0 turns that off.

    The output of workers appears live in ``sys.stdout`` and ``sys.stderr`` of this process, that is, in the cell. If
    one fails, the others are ended and :class:`accelerate_cpp.launch.workers.failure.WorkerFailed` is raised, a
    RuntimeError with that worker's traceback in its message. An interrupt ends all workers and raises
    KeyboardInterrupt. In all cases, no worker is left running.

    Raises:
        InvalidArgument: an argument has a value that is not supported, this process belongs to a process group, or the
            function uses an ``Accelerator`` that was created here, or something that cannot be copied to the helper
            process, such as a tensor on a GPU.
        WorkerFailed: a worker raised or died.
        AccelerateError: the helper process died.

    Example:
        >>> from accelerate_cpp import Accelerator, notebook_launcher
        >>> def train(epochs):
        ...     accelerator = Accelerator()
        ...     return accelerator.process_index, epochs
        >>> notebook_launcher(train, args=(10,), num_processes=2)
        [(0, 10), (1, 10)]
    """
    _check_call("notebook_launcher", function, args)
    precision = _precision(mixed_precision)
    launchers = _launchers(num_nodes, node_rank, rdzv_backend)
    port: int | None = _port("use_port", use_port)
    if launchers.count == 1:
        port = None if port == DEFAULT_PORT else port
    elif rdzv_endpoint:
        master_addr, port = _endpoint(rdzv_endpoint)
    supervision = Supervision(_restarts(max_restarts, launchers), log_line_prefix_template)
    if runs_on_tpus(num_processes):
        return run_on_tpus(_WorkerTask(function, args), precision)
    group = function_group(
        processes_of_notebook(num_processes),
        mixed_precision=precision,
        master_addr=master_addr,
        master_port=port,
        launchers=launchers,
    )
    if group.world_size == 1 and not max_restarts:
        return _run_here(function, args, group)
    try:
        return _launch(function, args, group, supervision)
    except (AccelerateError, KeyboardInterrupt) as end:
        raise end.with_traceback(None) from None  # the cell then shows the error without our own frames


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any] | None:
    """Runs ``function(*args)`` in ``num_processes`` workers that only use the CPU; see :func:`notebook_launcher`.

    Example:
        >>> from accelerate_cpp import Accelerator, debug_launcher
        >>> debug_launcher(lambda: Accelerator().process_index, num_processes=3)
        [0, 1, 2]
    """
    _check_call("debug_launcher", function, args)
    try:
        return _launch(function, args, function_group(num_processes, cpu=True))
    except (AccelerateError, KeyboardInterrupt) as end:
        raise end.with_traceback(None) from None


def _launch(
    function: Callable[..., Any], args: Sequence[Any], group: WorkerGroup, supervision: Supervision | None = None
) -> list[Any] | None:
    _refuse_accelerator_of_this_process(function, args)
    obstacle = obstacle_to_forks(cpu=group.cpu)
    task = _WorkerTask(function, args, group.num_threads)
    display = cell_display() if group.world_size > 1 else None
    open_standard_streams()
    with result_files(group.num_processes) as results:
        if obstacle is None:
            run_forked(task, group, results, Parent(display=display, show=sender()), supervision)
        else:
            from accelerate_cpp.launch.fork.fork_server import run_in_fork_server  # loads cloudpickle

            _tell_once(obstacle)
            used = (function, args)
            run_in_fork_server(task, used, group, results, _IMPORTED_BY_THE_FORK_SERVER, display, supervision)
        return values_of(results)


@cache
def _tell_once(obstacle: str) -> None:
    warnings.warn(
        f"{obstacle}; the workers are forked from a helper process instead, to which the function and what it uses are "
        "copied",
        stacklevel=4,
    )


def _run_here(function: Callable[..., Any], args: Sequence[Any], group: WorkerGroup) -> list[Any] | None:
    with exported({env_table.MIXED_PRECISION: group.mixed_precision}), _session_set_aside():
        value = function(*args)
    return None if value is None else [value]


@contextmanager
def _session_set_aside() -> Iterator[None]:
    """Inside it there is no session, so that the function's ``Accelerator`` is the first; restores the old one."""
    session, accumulation = current.session, current.accumulation
    if session is None:
        yield
        return
    views = [view._shared_state for view in _classes_of_state()]
    shown = [dict(view) for view in views]
    _forget_session()
    try:
        yield
    finally:
        current.session, current.accumulation = session, accumulation
        for view, before in zip(views, shown, strict=True):
            view.clear()
            view.update(before)


def _forget_session() -> None:
    current.session = None
    current.accumulation = Accumulation()
    for view in _classes_of_state():
        view._shared_state.clear()


def _classes_of_state() -> list[Any]:
    """The classes that show a session; empty as long as they, and torch with them, have not been imported."""
    state = sys.modules.get("accelerate_cpp.state")
    return [] if state is None else [state.PartialState, state.AcceleratorState, state.GradientState]


class _WorkerTask:
    """Runs the user's function in a forked worker, which first drops its parent's session."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], num_threads: int | None = None) -> None:
        self._function = function
        self._args = args
        self._num_threads = num_threads

    def __call__(self) -> object:
        _forget_session()
        torch = sys.modules.get("torch")
        if torch is not None and self._num_threads is not None:  # it read OMP_NUM_THREADS when the parent imported it
            torch.set_num_threads(self._num_threads)
        compiler = sys.modules.get("torch._inductor.async_compile")
        if compiler is not None:  # the parent's pool has no threads here, and torch would wait for them forever
            compiler.AsyncCompile.pool.cache_clear()
        return self._function(*self._args)


def _precision(asked: str) -> str | None:
    """The requested precision; for ``"no"``, the default, ``None``, so that the environment decides."""
    precision = str(asked).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise InvalidArgument(f"mixed_precision={asked!r} is not supported: expected 'no', 'fp16', 'bf16' or 'fp8'")
    return None if precision == "no" else precision


def _launchers(num_nodes: int, node_rank: int, rdzv_backend: str) -> Launchers:
    """The number of this machine, and how many there are."""
    if num_nodes > 1 and rdzv_backend != "static":
        raise InvalidArgument(
            f"rdzv_backend={rdzv_backend!r}: notebook launches on several machines only support rdzv_backend='static' "
            "(master_addr and use_port); for other backends run a script with `accelerate-cpp launch --rdzv_backend`"
        )
    return replace(ALONE, count=num_nodes, rank=node_rank, source=f"num_nodes={num_nodes}, node_rank={node_rank}")


def _restarts(max_restarts: int, launchers: Launchers) -> int:
    if max_restarts < 0 or (max_restarts and launchers.count > 1):
        raise InvalidArgument(
            f"max_restarts={max_restarts}: expected 0 or more, and 0 with num_nodes={launchers.count}, because "
            "restarts need an agreement between the machines; `accelerate-cpp launch --max_restarts` restarts scripts "
            "on several"
        )
    return max_restarts


def _refuse_accelerator_of_this_process(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """It only knows one process: workers that used it would each train alone, without any warning."""
    module = sys.modules.get("accelerate_cpp.accelerator")
    if module is None:
        return
    for name, value in (*variables_reached(function), *((f"args[{index}]", arg) for index, arg in enumerate(args))):
        if isinstance(value, module.Accelerator):
            raise InvalidArgument(
                f"{getattr(function, '__name__', function)} uses `{name}`, an Accelerator of this process, which is "
                "not connected to the workers: create the Accelerator inside the function"
            )


def _endpoint(text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if not (address and colon):
        raise InvalidArgument(f"rdzv_endpoint={text!r}: expected an address and a port, such as 10.0.0.1:29500")
    return address, _port("rdzv_endpoint", port)


def _port(name: str, text: str | int) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"{name}={text!r}: expected a port number from 0 to 65535")
    return port
