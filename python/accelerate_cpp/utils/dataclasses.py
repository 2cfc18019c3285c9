"""Options of a run as users write them: plugins, keyword handlers and configurations, next to the enums they use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils.enums import (
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from accelerate_cpp.utils.handlers import KwargsHandler
from accelerate_cpp.utils.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
]


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``. Without mixed precision nothing is cast, so they change nothing.

    ``outputs_in_fp32`` concerns what prepared models return: converted to fp32 by default, otherwise left in fp16 or
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
        """The options of the wrapper itself; those of its communication hook are ignored unless asked for."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the loss scaler for fp16, named as in ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of the default process group.

    ``backend="nccl"`` is the default and means: the right one for the device. ``timeout=None`` leaves the default of
    the process group in place; any other value applies, also one that happens to equal a default.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def to_kwargs(self) -> dict[str, Any]:
        """Every field that is set."""
        return {name: value for name, value in self.to_dict().items() if value is not None}


_ACTIVITIES = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "xpu": "XPU",
    "mtia": "MTIA",
    "hpu": "HPU",
}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``; ``output_trace_dir`` is where each rank's trace is written."""

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


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    attribute = _ACTIVITIES.get(name)
    if attribute is None or not hasattr(torch.profiler.ProfilerActivity, attribute):
        raise InvalidArgument(f"ProfileKwargs.activities holds {name!r}; expected some of {', '.join(_ACTIVITIES)}")
    activity: torch.profiler.ProfilerActivity = getattr(torch.profiler.ProfilerActivity, attribute)
    return activity


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches become optimizer steps.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: whether the scheduler's count of steps follows the micro-batches.
        sync_with_dataloader: step on a loader's last batch, whatever the count.
        sync_each_batch: reduce gradients in every backward pass, which needs less memory and more communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders share their data out among the processes.

    Attributes:
        split_batches: each batch of the loader is cut into one slice per process, instead of each process getting
            batches of its own.
        dispatch_batches: rank 0 reads and sends every other rank its part; ``None``: for iterable datasets only.
        even_batches: repeat samples so that every process gets equally many batches.
        use_seedable_sampler: shuffle from ``data_seed`` plus the epoch alone.
        data_seed: the seed of that shuffle; ``None`` takes torch's.
        non_blocking: copy batches to the device without waiting.
        use_stateful_dataloader: loaders have ``state_dict`` and ``load_state_dict``, and continue inside an epoch.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a project keeps its files.

    Attributes:
        project_dir: the folder of the project.
        logging_dir: the folder for logs; ``project_dir`` when ``None``.
        automatic_checkpoint_naming: number checkpoints.
        total_limit: how many numbered checkpoints are kept; ``None`` keeps all.
        iteration: the number of the next checkpoint.
        save_on_each_node: save once per machine instead of once.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets ``project_dir``, and ``logging_dir`` where it was not set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def by_class(handlers: Iterable[KwargsHandler] | None) -> dict[type[KwargsHandler], KwargsHandler]:
    """``handlers`` by their class; another kind of object or two of one class raise ``ValueError``."""
    found: dict[type[KwargsHandler], KwargsHandler] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise InvalidArgument(f"kwargs_handlers holds {handler!r}; expected instances of KwargsHandler")
        if type(handler) in found:
            raise InvalidArgument(f"kwargs_handlers holds two {type(handler).__name__}; give one")
        found[type(handler)] = handler
    return found
