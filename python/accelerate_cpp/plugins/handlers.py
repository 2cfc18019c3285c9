"""The objects for ``Accelerator(kwargs_handlers=[...])``: keyword arguments of objects that it creates."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from accelerate_cpp.comm.compression_hooks import hook_for, require_hook
from accelerate_cpp.config import unsupported
from accelerate_cpp.config.file import in_one_step
from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.plugins.enums import DDPCommunicationHookType


class KwargsHandler:
    """Keyword arguments for something that ``Accelerator`` creates on the user's behalf."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        defaults = self._defaults()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def _defaults(self) -> dict[str, Any]:
        """The result of :meth:`to_dict` if nothing was chosen."""
        return type(self)().to_dict()


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``. Without mixed precision nothing is cast, so they have no effect.

    ``outputs_in_fp32``: whether outputs of prepared models are converted to fp32 (the default), or stay in fp16 or
    bf16, which halves the memory of large outputs.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    outputs_in_fp32: bool = True


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of data parallelism, named as in ``torch.nn.parallel.DistributedDataParallel``. Sizes are in MB."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The options of the wrapper itself; those of its communication hook are ignored unless requested."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def strategy_options(self) -> dict[str, Any]:
        """The values that were set, with the communication hook, if there is one, under the names of its parts."""
        options = self.to_kwargs()
        if str(self.comm_hook) != "no":
            options.update(comm_hook=str(self.comm_hook), comm_wrapper=str(self.comm_wrapper))
            options.update(comm_state_option=dict(self.comm_state_option))
        return options

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Registers the chosen communication hook on ``model``; without a hook it has no effect.

        Args:
            model: a ``DistributedDataParallel``, or what ``prepare`` returned, before its first backward pass.

        Raises:
            InvalidArgument: ``comm_wrapper`` is not a wrapper or has no hook to wrap, or ``model`` already has a hook.
        """
        hook = hook_for(str(self.comm_hook), str(self.comm_wrapper), self.comm_state_option)
        if hook is not None:
            model.register_comm_hook(*hook)  # type: ignore[operator]


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the loss scaler for fp16, named as in ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


class _Unset(timedelta):
    """A timeout that was not passed by the caller."""

    def __repr__(self) -> str:
        return repr(timedelta(seconds=self.total_seconds()))


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of the default process group.

    ``backend="nccl"`` is the default and means the right backend for the device. Without a ``timeout``, the field shows
    torch's default for that backend, and the process group keeps its own default. A value that you pass is always used,
    even if it equals a default.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def to_kwargs(self) -> dict[str, Any]:
        """Every field that is set."""
        return {
            name: value for name, value in self.to_dict().items() if value is not None and not isinstance(value, _Unset)
        }

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = _Unset(minutes=10 if self.backend == "nccl" else 30)


PROFILE_PATTERN_NAME = "profile_{suffix}.json"

_ACTIVITIES = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "xpu": "XPU",
    "mtia": "MTIA",
    "hpu": "HPU",
}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``; each rank's trace is written to ``output_trace_dir``."""

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """The profiler; an unknown activity raises ``ValueError``."""
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def write_trace(self, profiler: torch.profiler.profile, rank: int) -> None:
        """Writes the trace of ``rank`` into ``output_trace_dir``, if that is set; creates the folder."""
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            path = Path(self.output_trace_dir, PROFILE_PATTERN_NAME.format(suffix=rank))
            try:
                with in_one_step(path) as waiting:
                    profiler.export_chrome_trace(str(waiting))
            except OSError as error:
                raise SystemFailure(
                    error.errno,
                    f"{error.strerror}: the profile {path} cannot be written; make room or choose another "
                    "output_trace_dir",
                ) from error


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    attribute = _ACTIVITIES.get(name)
    if attribute is None or not hasattr(torch.profiler.ProfilerActivity, attribute):
        raise InvalidArgument(f"ProfileKwargs.activities contains {name!r}; expected some of {', '.join(_ACTIVITIES)}")
    activity: torch.profiler.ProfilerActivity = getattr(torch.profiler.ProfilerActivity, attribute)
    return activity


def by_class(handlers: Iterable[KwargsHandler] | None) -> dict[type[KwargsHandler], KwargsHandler]:
    """``handlers`` by their class; another kind of object or two of one class raise ``ValueError``."""
    found: dict[type[KwargsHandler], KwargsHandler] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise InvalidArgument(f"kwargs_handlers contains {handler!r}; expected instances of KwargsHandler")
        if type(handler) in found:
            raise InvalidArgument(f"kwargs_handlers contains two {type(handler).__name__}; pass one")
        found[type(handler)] = handler
    return found


def accepted_handlers(handlers: Iterable[KwargsHandler] | None) -> dict[type[KwargsHandler], Any]:
    """Like :func:`by_class`, but checks that no handler requests something unsupported.

    Raises:
        InvalidArgument: as :func:`by_class`; or a handler is not supported, or requests a hook that does not exist.
    """
    accepted: dict[type[KwargsHandler], Any] = dict(by_class(handlers))
    unsupported.refuse_given({kind.__name__: handler for kind, handler in accepted.items()})
    ddp = accepted.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
    require_hook(str(ddp.comm_hook), str(ddp.comm_wrapper))
    return accepted
