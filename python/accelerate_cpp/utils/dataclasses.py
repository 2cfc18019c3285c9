"""Options of a run as users write them: plugins, keyword handlers and configurations, next to the enums they use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch

from accelerate_cpp.borrowed_names import lending
from accelerate_cpp.config.compile import DYNAMO_DEFAULTS, compile_dynamo, compile_dynamo_field
from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallelism_config import ParallelismConfig
from accelerate_cpp.utils.deepspeed_plugin import DeepSpeedPlugin
from accelerate_cpp.utils.enums import (
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from accelerate_cpp.utils.fsdp_plugin import FullyShardedDataParallelPlugin, get_module_class_from_name
from accelerate_cpp.utils.handlers import KwargsHandler
from accelerate_cpp.utils.megatron_models import add_model_config_to_megatron_parser
from accelerate_cpp.utils.megatron_plugin import MegatronLMPlugin
from accelerate_cpp.utils.parallelism import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accelerate_cpp.utils.quantization import BnbQuantizationConfig
from accelerate_cpp.utils.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "add_model_config_to_megatron_parser",
    "get_module_class_from_name",
]

__getattr__ = lending("utils.dataclasses")


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

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Lets ``model`` exchange gradients through the hook that is chosen here; without one nothing changes.

        Args:
            model: a ``DistributedDataParallel``, or what ``prepare`` returned, before its first backward pass.

        Raises:
            InvalidArgument: ``comm_wrapper`` has no hook to wrap, or is no wrapper; or ``model`` has a hook already.
        """
        from accelerate_cpp.parallel.comm_hooks import hook_for

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
    """A timeout that nobody has passed."""

    def __repr__(self) -> str:
        return repr(timedelta(seconds=self.total_seconds()))


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of the default process group.

    ``backend="nccl"`` is the default and means: the right one for the device. Without a ``timeout`` the field has the
    one that torch's group of that backend would have, and the default of the process group stays in place; any value
    that is passed applies, also one that happens to equal a default.
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
class TorchDynamoPlugin(KwargsHandler):
    """How ``torch.compile`` compiles models while they are prepared. It may be changed until then.

    Attributes:
        backend: a :class:`DynamoBackend` or its name in any case; ``NO`` compiles nothing. ``None`` takes
            ``ACCELERATE_DYNAMO_BACKEND``, as other fields that are ``None`` take theirs.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or another one of the backend.
        fullgraph: refuse breaks of the graph.
        dynamic: compile for shapes that change; ``None`` lets the compiler find out which do.
        options: of the backend, instead of a mode.
        disable: compile nothing, for tests.
        use_regional_compilation: compile the blocks of each ``ModuleList`` whose blocks are of one class one by one,
            of which those that are alike share one compilation. A model without such blocks is compiled as a whole.

    Raises:
        ValueError: there is no backend of that name.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        for name in DYNAMO_DEFAULTS:
            value, found = compile_dynamo_field(name, getattr(self, name))
            setattr(self, name, _dynamo_backend(value, found) if name == "backend" else value)

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of all fields, the backend in lower case, as ``torch.compile`` knows it."""
        fields = super().to_dict()
        return {**fields, "backend": str(_dynamo_backend(fields["backend"], "TorchDynamoPlugin.backend")).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``: the fields that differ from their defaults, whatever the variables say."""
        options = super().to_kwargs()
        options.pop("use_regional_compilation", None)
        return options

    def _defaults(self) -> dict[str, Any]:
        return {**DYNAMO_DEFAULTS, "options": None, "disable": False}

    def dynamo_config(self) -> DynamoConfig | None:
        """What models are compiled with now; ``None`` if they are not.

        Raises:
            ValueError: a mode and options are both given.
        """
        return compile_dynamo(self.to_kwargs(), by_region=bool(self.use_regional_compilation))


def _dynamo_backend(value: Any, found: str) -> DynamoBackend:
    """The backend that ``value`` names; ``found`` is what the caller wrote."""
    name = str(value).upper()
    if name not in DynamoBackend.list():
        known = ", ".join(DynamoBackend.list())
        raise InvalidArgument(f"{found}: no such backend of torch.compile; expected one of {known}, in any case")
    return DynamoBackend(name)


@dataclass
class DataLoaderConfiguration:
    """How prepared data loaders share their data out among the processes.

    Attributes:
        split_batches: each batch of the loader is cut into one slice per process, instead of each process getting
            batches of its own.
        dispatch_batches: rank 0 reads and sends every other rank its part; ``None``: for iterable datasets only.
        even_batches: repeat samples so that every process gets equally many batches.
        use_seedable_sampler: shuffle from ``data_seed`` plus the epoch alone, as torch does with such a seed. The order
            takes 4 bytes for each sample; ``"computed"`` shuffles in one that takes none, for data of any length.
        data_seed: the seed of that shuffle; ``None`` takes torch's.
        non_blocking: copy batches to the device without waiting.
        use_stateful_dataloader: loaders have ``state_dict`` and ``load_state_dict``, and continue inside an epoch.
            Where torchdata is installed they are its ``StatefulDataLoader``.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool | str = False
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
