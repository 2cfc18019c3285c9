"""``Accelerator``: the object that a training script uses. It only delegates to other modules."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accelerate_cpp import checkpointing
from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.checkpoint.checkpoints_of_run import Checkpoints
from accelerate_cpp.checkpoint.optimizer_names import parameters_of
from accelerate_cpp.config import env_table, unsupported
from accelerate_cpp.config.compile import compile_accumulation
from accelerate_cpp.data.uneven import overriding_even_batches
from accelerate_cpp.data_loader import prepare_data_loader, skip_first_batches
from accelerate_cpp.devices.memory import release_cache
from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.data_parallel import core_backend
from accelerate_cpp.parallel.data_parallel_strategy import synchronising
from accelerate_cpp.parallelism_config import ParallelismConfig
from accelerate_cpp.plugins.configurations import chosen_dynamo_plugin
from accelerate_cpp.plugins.data_parallelism import rank_along, with_tensor_plugin
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.plugins.deepspeed_choice import one_argument
from accelerate_cpp.plugins.fp8_recipes import with_recipe
from accelerate_cpp.plugins.handlers import accepted_handlers
from accelerate_cpp.precision.grad_scaler import scaled_loss, unscale_all
from accelerate_cpp.precision.plan import PrecisionPlan
from accelerate_cpp.prepare.megatron.engine import MegatronEngine, without_engine
from accelerate_cpp.prepare.megatron.preparing import MegatronRun
from accelerate_cpp.prepare.metrics import all_tensors, drop_repeated, one_per_batch, rows_of_last_batch
from accelerate_cpp.prepare.order import (
    autocast_options,
    evaluated,
    is_prepared,
    placements_of,
    precision_plan,
    prepare_together,
    remember,
)
from accelerate_cpp.prepare.private_steps import PreparationSteps
from accelerate_cpp.prepare.uneven_inputs import uneven_inputs
from accelerate_cpp.prepare.unprepared import warn_of_unprepared
from accelerate_cpp.prepare.whole_batches import Evaluation, evaluated_batch, loss_of_batch, only_model
from accelerate_cpp.runtime import current, preemption
from accelerate_cpp.runtime.gradient_state import GradientStateOf, begin_accumulation
from accelerate_cpp.runtime.reading import OnUneven
from accelerate_cpp.scheduler import AcceleratedScheduler
from accelerate_cpp.state import AcceleratorState, open_session, precision_of_run
from accelerate_cpp.trackers.active import ActiveTrackers
from accelerate_cpp.trackers.general import GeneralTracker
from accelerate_cpp.tracking import filter_trackers
from accelerate_cpp.utils.dataclasses import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    MSAMPRecipeKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from accelerate_cpp.utils.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accelerate_cpp.utils.imports import is_bitsandbytes_multi_backend_available, is_xpu_available
from accelerate_cpp.utils.megatron_lm import (
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from accelerate_cpp.utils.operations import gather, gather_object, pad_across_processes, reduce
from accelerate_cpp.utils.other import extract_model_from_parallel, save

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Accelerator"]

__getattr__ = lending("accelerator")

T = TypeVar("T")
# Subclasses of the original's Accelerator take these as the defaults of arguments that it no longer has, but the first.
_split_batches, _dispatch_batches, _even_batches, _use_seedable_sampler = (object() for _ in range(4))
_ON_ACCELERATORS = frozenset(kind for kind in DistributedType if kind.startswith("MULTI_")) - {
    DistributedType.MULTI_CPU
}


def _replaced_conversion() -> Callable[..., Any] | None:
    """The function with which a program has replaced the borrowed ``convert_model_to_fp8_ao`` of this module."""
    return globals().get("convert_model_to_fp8_ao")


class Accelerator(PreparationSteps):
    """Trains a model on one or many processes with the same script.

    Args:
        device_placement: move models and batches to the device of their process.
        split_batches: without effect; use ``dataloader_config``.
        mixed_precision: the precision of forward and backward passes: ``"no"`` (the dtype of the parameters),
            ``"fp16"``, ``"bf16"`` or ``"fp8"`` (linear layers, through a library that has to be installed; the rest in
            bf16); ``None`` takes ``ACCELERATE_MIXED_PRECISION``.
        gradient_accumulation_steps: micro-batches per optimizer step, at least 1;
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` takes precedence over it.
        cpu: use the CPU even when an accelerator is present.
        dataloader_config: how loaders divide their data among the processes.
        rng_types: the generators that are synchronised over the processes when a pass over a loader starts;
            ``["generator"]`` when ``None``.
        log_with: the experiment trackers, one or a list: names (``"tensorboard"``, ``"mlflow"``, ``"wandb"``,
            ``"aim"``, ``"clearml"``, ``"comet_ml"``, ``"dvclive"``, ``"swanlab"``, ``"trackio"``, those of registered
            classes, or ``"all"`` for the built-in ones that are installed), members of ``LoggerType``, or objects of
            subclasses of :class:`~accelerate_cpp.tracking.GeneralTracker`. Trackers whose libraries are not installed
            are skipped with a warning.
        project_dir: the folder of the project.
        project_config: where a project keeps its files; its ``project_dir`` is set from the argument above if it has
            none.
        gradient_accumulation_plugin: instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: schedulers step only when their optimizers step, and then once for every process.
        kwargs_handlers: at most one each of ``AutocastKwargs``, ``DistributedDataParallelKwargs``,
            ``GradScalerKwargs``, ``InitProcessGroupKwargs`` and ``ProfileKwargs``, and one recipe for fp8:
            ``AORecipeKwargs``, ``TERecipeKwargs`` or ``MSAMPRecipeKwargs``.
        dynamo_backend: the ``torch.compile`` backend with which ``prepare`` compiles models, in upper or lower case;
            ``None`` uses ``ACCELERATE_DYNAMO_BACKEND``, and ``"no"`` compiles nothing.
        dynamo_plugin: all options of the compiler; pass it instead of ``dynamo_backend``.
        fsdp_plugin: shards parameters, gradients and states of optimizers over the processes.
        parallelism_config: the size of each kind of parallelism: copies, shards (with ``fsdp_plugin``), split layers,
            split sequences and stages.
        deepspeed_plugin: trains through DeepSpeed, which has to be installed; also a dict of several plugins by name,
            of which the first is selected until ``state.select_deepspeed_plugin`` selects another.
        deepspeed_plugins: the same.
        torch_tp_plugin: the old form of ``parallelism_config=ParallelismConfig(tp_size=...)``.
        megatron_lm_plugin: trains as Megatron-LM does: the plugin chooses the mesh, and a call of the prepared model is
            a whole step.

    Raises:
        ValueError: an argument or a variable asks for something that is contradictory, unknown or not supported yet.
        ImportError: the library that fp8 needs is not installed.
    """

    _scheduler_types = (LRScheduler, AcceleratedScheduler)
    state: AcceleratorState
    flag_tensor: torch.Tensor | None
    """The flag that :meth:`set_trigger` sets to 1, 0-dim; ``None`` before the first use."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _split_batches,  # type: ignore[assignment]
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        if split_batches is not _split_batches:
            warnings.warn(
                "Accelerator(split_batches=...) has no effect; pass "
                "dataloader_config=DataLoaderConfiguration(split_batches=...)",
                stacklevel=2,
            )
        precision = None if mixed_precision is None else str(mixed_precision)
        handlers = with_recipe(accepted_handlers(kwargs_handlers), precision_of_run(precision))
        accumulation = compile_accumulation(
            gradient_accumulation_steps,
            None if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_kwargs(),
        )
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self._trackers = ActiveTrackers(filter_trackers(log_with, self.logging_dir))
        dynamo = chosen_dynamo_plugin(dynamo_plugin, dynamo_backend)

        self._session = open_session(
            cpu,
            precision,
            accumulation,
            handlers,
            dynamo,
            fsdp_plugin,
            with_tensor_plugin(parallelism_config, torch_tp_plugin),
            one_argument(deepspeed_plugin, deepspeed_plugins),
            megatron_lm_plugin,
        )
        self._accumulation = begin_accumulation(accumulation)
        self._engine: MegatronEngine | None = None
        self.state = AcceleratorState()
        self.gradient_state = GradientStateOf(self._accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if not self.dataloader_config.split_batches:  # else a step has as many samples with any number of processes
            self._accumulation.elastic = self._session.elastic
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.autocast_handler = handlers.get(AutocastKwargs)
        self.scaler_handler = handlers.get(GradScalerKwargs)
        self.ddp_handler = handlers.get(DistributedDataParallelKwargs)
        self.init_handler = handlers.get(InitProcessGroupKwargs)
        self.profile_handler = handlers.get(ProfileKwargs)
        self.ao_recipe_handler = handlers.get(AORecipeKwargs)
        self.te_recipe_handler = handlers.get(TERecipeKwargs)
        self.msamp_recipe_handler = handlers.get(MSAMPRecipeKwargs)
        self.fp8_recipe_handler = handlers.get(FP8RecipeKwargs)
        self.scaler = self._session.precision.make_scaler(
            self.scaler_handler.to_kwargs() if self.scaler_handler else None,
            gradients_are_measured=core_backend() is not None and not self._session.config.shards,
            layers_are_split=self._session.topology.mesh.size("tp") > 1,
            any_rank=self._session.strategy.any_rank,
        )
        self.flag_tensor = None
        self._prepared = Bundle()
        self._has_stepped = False
        self._checkpoints = Checkpoints()

    # Processes and devices

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run: ``NO`` for one process, otherwise according to the kind of device."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes on all hosts."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return self.state.local_process_index

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator."""
        return self.use_distributed and self.distributed_type in _ON_ACCELERATORS

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Returns when every process has called it.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> from pathlib import Path
            >>> def work():
            ...     accelerator = Accelerator()
            ...     if accelerator.is_main_process:
            ...         Path("vocabulary.txt").write_text("a b c")
            ...     accelerator.wait_for_everyone()  # now the file is there, for every process
            ...     return Path("vocabulary.txt").read_text()
            >>> debug_launcher(work, num_processes=2)
            ['a b c', 'a b c']
        """
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 of each host.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     accelerator.print(f"{accelerator.num_processes} processes print this once")
            >>> debug_launcher(work, num_processes=2)
            2 processes print this once
        """
        self.state.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates ``function`` so that it only runs on rank 0; on other ranks it returns ``None``.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     @accelerator.on_main_process
            ...     def download():
            ...         return "downloaded"
            ...     return download()
            >>> debug_launcher(work, num_processes=2)
            ['downloaded', None]
        """
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates ``function`` so that it only runs on rank 0 of each host; on other ranks it returns ``None``.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     @accelerator.on_local_main_process
            ...     def unpack():
            ...         return "unpacked on this host"
            ...     return unpack()
            >>> debug_launcher(work, num_processes=2)
            ['unpacked on this host', None]
        """
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates ``function`` so that it only runs on the highest rank; on other ranks it returns ``None``.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     @accelerator.on_last_process
            ...     def rank():
            ...         return accelerator.process_index
            ...     return rank()
            >>> debug_launcher(work, num_processes=2)
            [None, 1]
        """
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates ``function`` so that it only runs on rank ``process_index``; on other ranks it returns ``None``.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     @accelerator.on_process(process_index=1)
            ...     def rank():
            ...         return accelerator.process_index
            ...     return rank()
            >>> debug_launcher(work, num_processes=2)
            [None, 1]
        """
        return self.state.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorates ``function`` to only run on rank ``local_process_index`` of each host; else it returns ``None``.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     @accelerator.on_local_process(local_process_index=1)
            ...     def rank():
            ...         return accelerator.local_process_index
            ...     return rank()
            >>> debug_launcher(work, num_processes=2)
            [None, 1]
        """
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the other ranks do. They continue even if rank 0 raises in it.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> from pathlib import Path
            >>> def work():
            ...     accelerator = Accelerator()
            ...     with accelerator.main_process_first():
            ...         made_here = not Path("cache").exists()
            ...         Path("cache").mkdir(exist_ok=True)
            ...     return made_here
            >>> debug_launcher(work, num_processes=2)
            [True, False]
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 of each host runs the block before the others do.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> from pathlib import Path
            >>> def work():
            ...     accelerator = Accelerator()
            ...     with accelerator.local_main_process_first():
            ...         made_here = not Path("local-cache").exists()
            ...         Path("local-cache").mkdir(exist_ok=True)
            ...     return made_here
            >>> debug_launcher(work, num_processes=2)
            [True, False]
        """
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Gives each process its consecutive part of ``inputs``; see :meth:`PartialState.split_between_processes`.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
            ...         return prompts
            >>> debug_launcher(work, num_processes=2)
            [['a', 'b'], ['c']]
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    # Settings

    @property
    def mixed_precision(self) -> str:
        """The precision of forward and backward passes."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run under ``torch.autocast``."""
        return self._session.precision.name != "no"

    @property
    def fp8_enabled(self) -> bool:
        """Whether prepared models compute in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is an fp8 recipe: the user's or the default one."""
        return self._session.config.fp8 is not None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; in other precisions, the value of ``ACCELERATE_FP8_BACKEND``."""
        fp8 = self._session.config.fp8
        return FP8BackendType(env_table.FP8_BACKEND.get() if fp8 is None else fp8.backend)

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Always false: the cast to fp8 is inside the wrapper that distributes the model."""
        return False

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batches are cut into one slice per process."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data for all processes; ``None`` means only for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that every process gets equally many batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool | str:
        """Whether shuffling depends only on the seed and the epoch; ``"computed"`` if its order takes no memory."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders have a state and continue inside an epoch."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder for logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self.project_configuration.iteration

    # Kinds of parallelism

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The configuration that was passed, if any."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of ``parallelism_config``; ``None`` if none of its dimensions has several processes."""
        return self.state.device_mesh

    @property
    def data_parallel_rank(self) -> int:
        """Which copy of the model this process has; ``InvalidArgument`` without a ``parallelism_config``."""
        return rank_along(self.parallelism_config, self.torch_device_mesh, "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of it this process has; ``InvalidArgument`` without a ``parallelism_config``."""
        return rank_along(self.parallelism_config, self.torch_device_mesh, "dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of split layers this process has; ``InvalidArgument`` without a ``parallelism_config``."""
        return rank_along(self.parallelism_config, self.torch_device_mesh, "tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Which stages of models this process has; ``InvalidArgument`` without a ``parallelism_config``."""
        return rank_along(self.parallelism_config, self.torch_device_mesh, "pp")

    @property
    def context_parallel_rank(self) -> int:
        """Which part of split sequences this process has; ``InvalidArgument`` without a ``parallelism_config``."""
        return rank_along(self.parallelism_config, self.torch_device_mesh, "cp")

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by ``fully_shard``."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded by ``fully_shard``, which can be combined with other kinds of parallelism."""
        return self.is_fsdp2

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected plugin of DeepSpeed; ``None`` where it does not train."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The first engine of DeepSpeed that :meth:`prepare` made, in the original's wrapper; ``None`` without one."""
        engines = self._engines()
        return DeepSpeedEngineWrapper(engines[0]) if engines else None

    def _engines(self) -> list[Any]:
        """Those of this Accelerator; others may share its strategy."""
        return [one for one in self._session.strategy.engines() if any(one is model for model in self._models)]

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration of the engine that was prepared last, without ``"auto"``; before, that of the plugin.

        Raises:
            AttributeError: DeepSpeed does not train.
        """
        if self.deepspeed_plugin is None:
            raise AttributeError("deepspeed_config: this run does not use DeepSpeed")
        engines = self._engines()
        return cast(dict[str, Any], engines[-1].config) if engines else self.deepspeed_plugin.deepspeed_config

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Splits sequences over the processes along ``cp`` of the mesh inside the block; without any, has no effect.

        Within the block, each of ``buffers`` has the tokens of this process, and
        ``torch.nn.functional.scaled_dot_product_attention`` computes over all of them, as
        ``ParallelismConfig.cp_handler`` says (docs/model_parallelism.md). The loss is over the tokens of this process.
        The backward pass may run inside the block or after it.

        Args:
            buffers: the tensors to split in place: inputs, labels, positions, with whole sequences on all processes.
            buffer_seq_dims: the dimension of the sequence of each.
            no_restore_buffers: those that stay split after the block.

        Raises:
            InvalidArgument: a sequence cannot be divided, or inside the block, attention is not over split sequences.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, ParallelismConfig, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
            ...     tokens = torch.arange(8).reshape(1, 8)
            ...     with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...         return tokens.tolist()
            >>> debug_launcher(work, num_processes=2)
            [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
        """
        mesh, config = self.torch_device_mesh, self.parallelism_config
        if mesh is None or config is None or not config.cp_enabled:
            return nullcontext()
        from accelerate_cpp.parallel.context.context import ContextParallel

        strategy = "allgather" if config.cp_handler is None else str(config.cp_handler.cp_comm_strategy)
        return ContextParallel(mesh["cp"].get_group(), strategy).split(buffers, buffer_seq_dims, no_restore_buffers)

    def deepspeed_ulysses_dl_adapter(self, dl: T, model: Any) -> T:
        """The prepared loader ``dl`` with sequences split over processes, where ``sp_size`` of the mesh says so.

        :meth:`prepare` does that for loaders that come with their model; others have to be given after it. Without
        split sequences, ``dl`` is returned as it is.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(4), batch_size=2))
            >>> accelerator.deepspeed_ulysses_dl_adapter(loader, model=None) is loader
            True
        """
        return cast(T, self._session.strategy.adapted(dl))

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether ``model``, or a part of it, was spread over several devices by a ``device_map``.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(2, 2)
            >>> accelerator.verify_device_map(model)
            False
            >>> model.hf_device_map = {"encoder": "cpu", "decoder": "disk"}  # as dispatch_model leaves it
            >>> accelerator.verify_device_map(model)
            True
        """
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    # Preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepares models, optimizers, data loaders and schedulers for this run. They may come in any order and number.

        A model in which nothing requires a gradient (a teacher, an encoder) is moved to the device and computes in the
        precision of the run, but is not distributed. Pass it to ``prepare`` again before you train it.

        A model that is sharded already, by FSDP of either version or a layout of ``DTensor`` s, is trained as it is:
        what sharded it averages its gradients. Other parameters start from those of rank 0, and are averaged.

        Args:
            args: what to prepare; objects of other types, and prepared ones, are returned as they are.
            device_placement: for each of ``args``, whether to move it to the device; ``None`` follows the constructor's
                choice, as a whole or for one object.

        Returns:
            The prepared objects in the order of ``args``: one object for one argument, else a tuple.

        Raises:
            ValueError: ``device_placement`` has another length than ``args``.
            ValueError: with several processes, a model that was spread over devices, or one to be trained that is
                sharded already, but only over a part of the processes.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=4)
            >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
            >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            >>> for batch in loader:
            ...     optimizer.zero_grad()
            ...     accelerator.backward(model(batch).mean())
            ...     optimizer.step()
            ...     scheduler.step()
        """
        placements = placements_of(args, device_placement)
        if self.distributed_type == DistributedType.MEGATRON_LM:
            prepared = self._prepare_for_engine(args, placements)
        else:
            prepared = prepare_together(self, args, placements, _replaced_conversion())
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_for_engine(self, items: tuple[Any, ...], placements: list[bool | None]) -> list[Any]:
        """``items`` with the engine of Megatron-LM in place of the model, which steps optimizer and schedule."""
        if self.gradient_accumulation_steps != 1:
            warnings.warn(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} has no effect with "
                "megatron_lm_plugin, whose engine steps with each batch; set num_micro_batches of the plugin",
                stacklevel=3,
            )
            self.gradient_accumulation_steps = 1
        fresh = [number for number, item in enumerate(items) if not is_prepared(item)]
        arranging = MegatronRun(
            self,
            [items[number] for number in fresh],
            lambda item: isinstance(item, (LRScheduler, MegatronLMDummyScheduler)),
        )
        ready = prepare_together(
            self, tuple(arranging.arranged()), [placements[number] for number in fresh], _replaced_conversion()
        )
        done, schedule = arranging.finished(ready)
        wrapped = None if schedule is None else MegatronLMSchedulerWrapper(schedule, self._optimizers)
        if wrapped is not None:
            remember(self._schedulers, wrapped)
        results = list(items)
        for number, one in zip(fresh, done, strict=True):
            if isinstance(one, MegatronEngine):
                self._engine = remember([], one)
            elif isinstance(items[number], torch.optim.Optimizer):
                one = remember([], MegatronLMOptimizerWrapper(one))
            results[number] = wrapped if one is not None and one is schedule else one
        return results

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Moves ``model`` to the device and prepares it for training on all processes.

        With ``evaluation_mode`` it is only moved (and compiled, if requested): gradients are not reduced, and it may
        have no trainable parameters.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True)
            >>> teacher(torch.ones(1, 2, device=accelerator.device)).shape
            torch.Size([1, 2])
        """
        if is_prepared(model) and (evaluation_mode or not self._session.strategy.is_thawed(model)):
            return remember(self._models, model)
        if evaluation_mode:
            return remember(self._models, evaluated(self, model, device_placement))
        (prepared,) = prepare_together(self, (model,), [device_placement], _replaced_conversion())
        return cast(torch.nn.Module, prepared)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """A loader that yields this process's share, on its device.

        ``slice_fn_for_dispatch`` cuts a rank's part from the batches that rank 0 reads for everyone.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(8), batch_size=2))
            ...     return [batch.tolist() for batch in loader]
            >>> debug_launcher(work, num_processes=2)
            [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
        """
        if is_prepared(data_loader):
            return remember(self._dataloaders, data_loader)
        config = self.dataloader_config
        sharded = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._session.topology.mesh.data_size,
            process_index=self._session.topology.mesh.data_rank,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        return remember(self._dataloaders, sharded)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """An optimizer that steps only where gradients are synchronised.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare_model(torch.nn.Linear(2, 1))
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> type(optimizer).__name__
            'AcceleratedOptimizer'
        """
        if is_prepared(optimizer):
            return remember(self._optimizers, optimizer)
        if self._session.strategy.steps_optimizer(optimizer):
            return remember(self._optimizers, DeepSpeedOptimizerWrapper(optimizer))
        placement = self.device_placement if device_placement is None else device_placement
        stepping = self._session.strategy.prepare_optimizer(optimizer)
        prepared = AcceleratedOptimizer(stepping, device_placement=placement, scaler=self.scaler)
        prepared._accumulation = self._accumulation
        return remember(self._optimizers, prepared)

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> LRScheduler | AcceleratedScheduler:
        """A scheduler that steps with its optimizer, which may already be prepared.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
            >>> scheduler.get_last_lr()
            [0.05]
        """
        if is_prepared(scheduler):
            return remember(self._schedulers, scheduler)
        if self._session.strategy.steps_scheduler(scheduler):
            return remember(self._schedulers, DeepSpeedSchedulerWrapper(scheduler, self._optimizers))
        own = [wrapped for wrapped in self._optimizers if wrapped.optimizer is getattr(scheduler, "optimizer", None)]
        prepared = AcceleratedScheduler(
            scheduler, own or self._optimizers, self.step_scheduler_with_optimizer, self.split_batches
        )
        prepared._accumulation = self._accumulation
        return remember(self._schedulers, prepared)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader like ``dataloader`` that starts after its first ``num_batches`` batches.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, num_batches=2)]
            [[4, 5]]
        """
        rest: DataLoader[Any] = skip_first_batches(dataloader, num_batches=num_batches)
        return rest

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer of the package ``lomo_optim`` was prepared, whose fused backward is not supported."""
        kinds = [kind for wrapped in self._optimizers for kind in type(wrapped.optimizer).__mro__]
        return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in kinds)

    @staticmethod
    def _bitsandbytes_computes_on_cpu() -> bool:
        return is_bitsandbytes_multi_backend_available() and not is_xpu_available()

    # Training

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and optimizers step, in the current micro-batch of this Accelerator."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self._accumulation.num_steps = compile_accumulation(plugin={"num_steps": gradient_accumulation_steps}).num_steps

    @property
    def step(self) -> int:
        """Micro-batches of this Accelerator since the last forced synchronisation."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any prepared optimizer left out its last step because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Counts one micro-batch: gradients stay local, and optimizers wait, unless it completes a step.

        Args:
            models: the models whose backward passes run in the block.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(4, 1))
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for batch in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(batch).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     print("step" if accelerator.sync_gradients else "accumulate")
            accumulate
            step
            accumulate
            step
        """
        current.accumulation = self._accumulation
        self._do_sync()
        synchronises = self.sync_gradients or self._accumulation.sync_each_batch
        with ExitStack() as stack:
            for model in () if synchronises else models:
                stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside this block, backward passes through ``model`` do not synchronise gradients.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
            ...     mine = torch.tensor([[float(accelerator.process_index)]])
            ...     with accelerator.no_sync(model):
            ...         accelerator.backward(model(mine).sum())
            ...     own = next(model.parameters()).grad.item()
            ...     accelerator.backward(model(mine).sum())  # averages the gradients of both passes
            ...     return own, next(model.parameters()).grad.item()
            >>> debug_launcher(work, num_processes=2)
            [(0.0, 1.0), (1.0, 1.0)]
        """
        return self._session.strategy.no_sync(without_engine(model))

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside this block, backward passes through ``model`` synchronise gradients even if the forward pass was in
        no_sync.

        Gradients that were accumulated before are synchronised, too. Nothing happens with one process.

        Args:
            model: as :meth:`prepare` returned it.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
            ...     with accelerator.no_sync(model):
            ...         output = model(torch.tensor([[float(accelerator.process_index)]]))
            ...     with accelerator.trigger_sync_in_backward(model):
            ...         accelerator.backward(output.sum())
            ...     return next(model.parameters()).grad.item()
            >>> debug_launcher(work, num_processes=2)
            [0.5, 0.5]
        """
        return synchronising(model)

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``; in fp16 the loss is scaled.

        The first call on several processes warns of a model or a loader that was never prepared.

        Args:
            loss: without ``weight``, a mean, which is divided by ``gradient_accumulation_steps``; with ``weight``, a
                sum, which is not divided.
            weight: the number of items in the sum, for example tokens. The gradients of all micro-batches and processes
                are added up and divided once by the sum of their weights, as in one big batch. Weights are added up
                separately for each model that the loss depends on.

        Raises:
            InvalidArgument: some backward passes of a step of a model have a weight and some have none; or its
                gradients have been divided by their weights already.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
            >>> inputs = torch.tensor([[1.0], [3.0]], device=accelerator.device)
            >>> accelerator.backward(model(inputs).mean())
            >>> next(model.parameters()).grad.item()
            2.0
            >>> model.zero_grad()
            >>> accelerator.backward(model(inputs).sum(), weight=len(inputs))  # a sum, and of how many
            >>> next(model.parameters()).grad.item()
            2.0
        """
        if self._session.progress is not None:
            self._session.progress.saw_loss(loss, weight)
        if self._engine is not None:
            self._engine.require_stepped(loss)
            return
        if self._session.strategy.trains_batches:
            raise InvalidArgument(
                "backward: a model in stages computes the gradients of a batch while it computes the loss; call "
                "accelerator.train_batch(batch, loss_fn, targets) in place of the model, the loss and backward"
            )
        self._backward(loss, weight, **kwargs)

    def _backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        self._begin_backward()
        if self._session.strategy.steps_in_backward:
            self._backward_and_step(loss, weight, **kwargs)
            return
        loss, weight = self._accumulation.weighted(loss, weight)
        scaled = loss if self.scaler is None else scaled_loss(self.scaler, loss, self._optimizers)
        strategy = self._session.strategy
        with self._accumulation.weights.of_pass(strategy, weight, self.sync_gradients) as weights:
            strategy.backward(scaled, weights, **kwargs)

    def _begin_backward(self) -> None:
        current.accumulation = self._accumulation
        if not self._has_stepped:
            self._has_stepped = True
            warn_of_unprepared(self._prepared, self._accumulation.reading, self._session.strategy, self.num_processes)

    def train_batch(
        self,
        batch: Any,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        targets: Any = None,
        model: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        """Forward pass, loss and backward pass for a batch, on any mesh; models in stages can be trained by it alone.

        Where models are not in stages, this is ``loss = loss_fn(model(batch), targets)`` and ``backward(loss)``. With
        ``pp_size`` of the mesh, all processes of a pipeline call it with the same batch, as prepared loaders yield it.

        Args:
            batch: what the model takes, with one row for each sample: a tensor, a tuple of tensors, or a mapping of its
                named inputs, with ``labels`` for a model of transformers that computes its own loss.
            loss_fn: called with outputs (``.logits`` if there are such) and targets, or with outputs alone if there are
                none; returns a mean over samples. By default, the loss that the model returns.
            targets: with the rows of the batch; of a mapping, by default its ``labels``, or itself without any.
            model: a prepared one; by default the only one.

        Returns:
            The loss of the batch, 0-dim, detached.

        Raises:
            InvalidArgument: there are several models or none, or nothing computes a loss.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> weight = torch.nn.init.ones_(model.weight)
            >>> model = accelerator.prepare(model)
            >>> inputs = torch.tensor([[1.0], [3.0]], device=accelerator.device)
            >>> accelerator.train_batch(inputs, torch.nn.functional.mse_loss, torch.zeros_like(inputs)).item()
            5.0
            >>> weight.grad.item()
            10.0
        """
        if self._engine is not None:
            raise InvalidArgument(
                "train_batch: with megatron_lm_plugin, a call of the prepared model, model(**batch), is a whole step"
            )
        chosen, strategy = model or only_model(self._models, "train_batch"), self._session.strategy
        if not strategy.trains_batches:
            loss = loss_of_batch(chosen, batch, loss_fn, targets)
            self.backward(loss)
            return loss.detach()
        found = self._train_stages(chosen, batch, loss_fn=loss_fn, targets=targets)
        if self._session.progress is not None:
            self._session.progress.saw_loss(found, None)
        return found

    def _train_stages(self, model: torch.nn.Module, batch: Any, **options: Any) -> torch.Tensor:
        """Adds the gradients of a batch to those of a model in stages; returns the loss."""
        self._begin_backward()
        share, _ = self._accumulation.weighted(torch.ones((), device=self.device), None)
        scale = share if self.scaler is None else scaled_loss(self.scaler, share, self._optimizers)
        return self._session.strategy.train_batch(model, batch, loss_scale=scale.item(), **options)

    def eval_batch(
        self,
        batch: Any,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        targets: Any = None,
        model: torch.nn.Module | None = None,
    ) -> Evaluation:
        """Loss and outputs for a batch, without gradients, on any mesh; arguments as those of :meth:`train_batch`.

        Returns:
            ``loss``, or ``None`` if nothing computes one, and ``outputs`` (``.logits`` if there are such); both on all
            processes.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.eval_batch(torch.ones(2, 1, device=accelerator.device)).outputs.shape
            torch.Size([2, 1])
        """
        chosen, strategy = model or only_model(self._models, "eval_batch"), self._session.strategy
        if not strategy.trains_batches or not strategy.in_shards(chosen):  # one prepared for evaluation is whole
            return evaluated_batch(chosen, batch, loss_fn, targets)
        found: Evaluation = strategy.eval_batch(chosen, batch, loss_fn=loss_fn, targets=targets, gather_outputs=True)
        return found

    def _backward_and_step(self, loss: torch.Tensor, weight: Any, scale_wrt_gas: bool = True, **kwargs: Any) -> None:
        """The backward pass of an engine that steps in it; ``scale_wrt_gas`` says whether the loss is still whole."""
        if weight is not None:
            raise InvalidArgument(
                "backward(loss, weight=...): DeepSpeed averages the gradients of processes, so sums cannot be divided "
                "by weights; pass a mean, without weight"
            )
        whole, _ = self._accumulation.weighted(loss, None) if scale_wrt_gas else (loss, None)
        self._session.strategy.backward_and_step(whole, self.sync_gradients, self._models, **kwargs)
        if self.sync_gradients and self._session.progress is not None:
            self._session.progress.step_ended(self._accumulation.reading)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Not supported: raises ``InvalidArgument``. (In the original, it also steps LOMO optimizers.)"""
        unsupported.refuse("lomo_backward", "Accelerator.lomo_backward")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides the gradients of ``optimizer`` by the scale of the loss; ``None`` means all prepared optimizers.

        Only has an effect in fp16. Gradients that are already un-scaled stay as they are, and so do those of a
        micro-batch that only accumulates: the next gradients are still scaled, and are added to them.

        Args:
            optimizer: one optimizer, prepared or not, or a list of them.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(mixed_precision="fp16")
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.backward(model(torch.ones(1, 1, device=accelerator.device)).sum() / 4)
            >>> next(model.parameters()).grad.item()  # scaled by 65,536
            16384.0
            >>> accelerator.unscale_gradients()
            >>> next(model.parameters()).grad.item()
            0.25
        """
        chosen = self._optimizers if optimizer is None else optimizer
        if self.sync_gradients:
            unscale_all(self.scaler, chosen if isinstance(chosen, (list, tuple)) else [chosen])

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scales gradients in place to a joint norm of at most ``max_norm``; returns the norm before (0-dim).

        Gradients of a scaled loss are un-scaled first. In a micro-batch that only accumulates, they stay scaled, and
        the limit is scaled like them.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
            >>> accelerator.backward(model(torch.tensor([[3.0, 4.0]], device=accelerator.device)).sum())
            >>> accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0).item()  # the norm before
            5.0
            >>> [round(value, 3) for value in next(model.parameters()).grad[0].tolist()]
            [0.6, 0.8]
        """
        if self._engine is not None:
            return self._engine.norm_of_step(max_norm)
        return self._clip_grad_norm(parameters, max_norm, norm_type)

    def _clip_grad_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        measured = unscale_all(self.scaler, self._optimizers if self.sync_gradients else (), left=tensors)
        scale = self._scale_of_gradients
        return self._session.strategy.clip_grad_norm(tensors, max_norm * scale, norm_type, measured) / scale

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps every gradient element in place to ``[-clip_value, clip_value]``; un-scales as ``clip_grad_norm_``.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
            >>> accelerator.backward(model(torch.tensor([[3.0, 0.5]], device=accelerator.device)).sum())
            >>> accelerator.clip_grad_value_(model.parameters(), clip_value=1.0)
            >>> next(model.parameters()).grad[0].tolist()
            [1.0, 0.5]
        """
        if self._session.strategy.steps_in_backward or self._engine is not None:
            who = "DeepSpeed has stepped in backward" if self._engine is None else "Megatron-LM's engine has stepped"
            raise InvalidArgument(
                f"clip_grad_value_: {who} already, and clips norms alone; set gradient_clipping in its configuration"
            )
        unscale_all(self.scaler, self._optimizers if self.sync_gradients else ())
        limit = float(clip_value) * self._scale_of_gradients
        given = self._session.strategy.as_stepped([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        self._session.strategy.prepare_to_clip(given)
        gradients = [local_part(one.grad) for one in given if one.grad is not None]
        if gradients:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)

    @property
    def _scale_of_gradients(self) -> float:
        """The factor that gradients still contain after un-scaling."""
        return 1.0 if self.scaler is None or self.sync_gradients else float(self.scaler.get_scale())

    def precision_plan(self, model: torch.nn.Module) -> PrecisionPlan:
        """The dtypes in which parameters of ``model`` are stored, computed, reduced and stepped; ``print`` shows a
        table.

        Args:
            model: as :meth:`prepare` returned it.

        Raises:
            ValueError: it has not been prepared.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> print(accelerator.precision_plan(model))
            mixed_precision='bf16' on cpu
            layer      parameters  elements  storage  compute   reduce  master
            Linear              2        20  float32  bfloat16  -       float32
            LayerNorm           2         8  float32  float32   -       float32
        """
        return precision_plan(self, model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """The autocast context of the run's mixed precision. It has no effect in full precision.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(mixed_precision="bf16")
            >>> matrix = torch.eye(2, device=accelerator.device)
            >>> with accelerator.autocast():
            ...     (matrix @ matrix).dtype
            torch.bfloat16
        """
        return self._session.precision.autocast(autocast_options(autocast_handler or self.autocast_handler))

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profiles the block; with ``output_trace_dir``, each rank then writes ``profile_<rank>.json`` there.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> with accelerator.profile() as profiler:
            ...     product = torch.ones(8, 8) @ torch.ones(8, 8)
            >>> any(event.key == "aten::mm" for event in profiler.key_averages())
            True
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        handler.write_trace(profiler, self.process_index)
        self.wait_for_everyone()

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None, mode: OnUneven = "join"
    ) -> Iterator[None]:
        """Inside this block, processes may have different numbers of batches.

        Args:
            joinables: the prepared models that are trained.
            even_batches: whether, inside the block, prepared loaders of map-style datasets fill up their last global
                batch, so that all processes have equally many batches; ``None`` keeps the setting.
            mode: what processes with more batches than others do. ``"join"``: they train on them, and gradients are
                averaged over the samples that exist (by torch's wrapper: over the processes); at the end, the others
                have their weights, optimizers and schedules. Where they need the others, for parameters in shards and
                as steps accumulate gradients, prepared loaders of these repeat their last batch, which counts nothing.
                ``"stop"``: prepared loaders end on all processes when one has no batches left. ``"error"``: they raise
                instead, and name that process.

        Raises:
            InvalidArgument: ``mode`` is not one of these, or a process ran out of batches with ``"error"``; with
                parameters in shards or accumulation, a loop reads no prepared loader, or calls ``loss.backward()``
                itself.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     model = accelerator.prepare(torch.nn.Linear(1, 1))
            ...     own = torch.ones(1 + accelerator.process_index, 1)  # one batch here, two there
            ...     with accelerator.join_uneven_inputs([model]):
            ...         for row in own:
            ...             model(row.unsqueeze(0)).sum().backward()
            ...     return len(own)
            >>> debug_launcher(work, num_processes=2)
            [1, 2]
        """
        with ExitStack() as stack:
            stack.enter_context(overriding_even_batches(self._dataloaders, even_batches))
            if self._engine is not None:
                warnings.warn("join_uneven_inputs has no effect with megatron_lm_plugin", stacklevel=4)
            elif self.use_distributed:
                stateful = partial(self._changed_by_steps, joinables)
                accumulates = self._accumulation.num_steps > 1
                stack.enter_context(uneven_inputs(self._session.strategy, joinables, mode, accumulates, stateful))
            yield

    def _changed_by_steps(self, joinables: Iterable[Any]) -> list[Any]:
        """The optimizers of the models among ``joinables``, their schedules, and the loss scaler."""
        models = [one for one in joinables if isinstance(one, torch.nn.Module)]
        weights = {id(weight) for model in models for weight in model.parameters()}
        optimizers = [one for one in self._optimizers if any(id(weight) in weights for weight in parameters_of(one))]
        inner = {id(one.optimizer) for one in optimizers}
        schedules = [
            schedule
            for schedule in self._schedulers
            if hasattr(schedule.scheduler, "state_dict")
            and any(id(getattr(one, "optimizer", one)) in inner for one in schedule.optimizers)
        ]
        return [*optimizers, *schedules, *([] if self.scaler is None else [self.scaler])]

    # Collectives

    def gather(self, tensor: Any) -> Any:
        """Concatenates the tensors of all processes along their first dimension, in nested containers as well.

        Every process gets the result; a 0-dim tensor gives one value per process.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
            >>> debug_launcher(work, num_processes=2)
            [[0, 1], [0, 1]]
        """
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers, and removes the samples that were repeated to fill up the last batch of the current loader.

        Of processes that compute with the same batches, as they split the layers of a model, one is gathered. Only
        tensors with one row per sample of the global batch are cut; scalars, and tensors whose rows were filtered or
        repeated, are returned as they are.

        Args:
            input_data: tensors in nested containers; anything else is gathered by pickling, as a list of samples.
            use_gather_object: pickle tensors as well.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     loader = accelerator.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            ...     for batch in loader:  # the second process gets 2, and 0 to fill up
            ...         return accelerator.gather(batch).tolist(), accelerator.gather_for_metrics(batch).tolist()
            >>> debug_launcher(work, num_processes=2)[0]
            ([0, 1, 2, 0], [0, 1, 2])
        """
        if self._accumulation.reading.repeats:
            raise InvalidArgument(
                "gather_for_metrics: inside join_uneven_inputs with sharded parameters or gradient accumulation, "
                "processes without batches repeat their last one, which is no sample for metrics; gather after the "
                "block, or use mode='stop'"
            )
        pickled = use_gather_object or not all_tensors(input_data)
        mesh, gathered = self._session.topology.mesh, input_data
        if self.num_processes > 1:
            gathered = one_per_batch(gather_object([input_data]) if pickled else gather(input_data), pickled, mesh)
        rows = rows_of_last_batch(self.gradient_state, mesh.data_size)
        return gathered if rows is None else drop_repeated(gathered, input_data, pickled, *rows)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The ``"sum"``, ``"mean"`` or ``"max"`` over all processes, as new tensors; ``scale`` has no effect.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     loss = torch.tensor(float(accelerator.process_index))
            ...     return accelerator.reduce(loss, "sum").item(), accelerator.reduce(loss, "mean").item()
            >>> debug_launcher(work, num_processes=2)
            [(1.0, 0.5), (1.0, 0.5)]
        """
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads ``dim`` with ``pad_index`` to the longest among the processes, at the end or at the front.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     tokens = torch.ones(1 + accelerator.process_index, dtype=torch.long)
            ...     return accelerator.pad_across_processes(tokens).tolist()
            >>> debug_launcher(work, num_processes=2)
            [[1, 0], [1, 1]]
        """
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raises a flag here that the next :meth:`check_trigger` sees on every process.

        Example:
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     for step in range(10):
            ...         if accelerator.is_last_process and step == 3:
            ...             accelerator.set_trigger()  # this process has seen enough
            ...         if accelerator.check_trigger():
            ...             return step
            >>> debug_launcher(work, num_processes=2)
            [3, 3]
        """
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has called :meth:`set_trigger` since the last check. Every process has to call it.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = torch.zeros_like(flag)
        return bool(reduce(flag).item())

    # Checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Saves everything that was prepared or registered, and the random states, into one folder.

        Call it on all processes, so that each can continue exactly where it was, or only on the main process; then the
        checkpoint contains only the random states of that process. The folder appears or changes in one step, when all
        files are on the disk. If a process is killed before that, the folder is as it was. With
        ``automatic_checkpoint_naming`` it is ``<project_dir>/checkpoints/checkpoint_<iteration>``, and older ones are
        removed afterwards, beyond ``total_limit``. Files are named as the original's, which can load them, besides
        ``accelerate_cpp.json``, which has their checksums.

        Args:
            output_dir: the folder, unless checkpoints are numbered. Other files in it are kept.
            safe_serialization: models in the safetensors format instead of pickles.
            blocking: if false, it returns as soon as everything is copied, and a thread writes the copy; its error is
                raised by the next ``save_state``, ``load_state``, ``wait_for_checkpoint`` or ``end_training``. A
                program that ends before ends with this error, and an exit code that is not 0.
            save_model_func_kwargs: options of the ``save_checkpoint`` of DeepSpeed's engines, where these train.

        Returns:
            The folder.

        Raises:
            ValueError: the numbered folder already exists, or no folder was given.
            OSError: writing failed on this rank; the other ranks raise ``CheckpointError``, which names this rank.
            PeerLost: a process has died, and the checkpoint would be without its part, as the last one, or the one
                that was resumed, was of all processes. Call it again on the main process to save without it.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> folder = accelerator.save_state("checkpoint")
            >>> sorted(path.name for path in folder.iterdir())
            ['accelerate_cpp.json', 'model.safetensors', 'random_states_0.pkl']
        """
        return checkpointing.save_state(self, output_dir, safe_serialization, blocking, save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restores what :meth:`save_state` of this package or of the original saved.

        Call it on all processes, or on one process for itself. Before anything is changed on any process, all processes
        read everything and compare names and shapes with the objects that will load it. Custom objects and hooks can
        still fail later. What the checkpoint does not have (random states of more processes or devices, a loss scale)
        stays as it is, and one warning names it. The next checkpoint gets a number that no folder has.

        Args:
            input_dir: the folder; ``None`` loads the newest numbered checkpoint that is complete.
            load_kwargs: for ``torch.load`` of optimizers and schedulers.
            load_model_func_kwargs: for ``load_state_dict`` of the models; and ``map_location``, ``"cpu"`` or
                ``"on_device"``, where states are read to.

        Raises:
            ValueError: there is no such folder, or no complete checkpoint.
            CheckpointError: a file is missing or damaged, would run code, or does not fit the object that loads it; or
                the number of registered objects differs.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
            >>> weight = next(model.parameters())
            >>> folder = accelerator.save_state("checkpoint")
            >>> saved, _ = weight.item(), weight.data.zero_()
            >>> accelerator.load_state("checkpoint")
            >>> weight.item() == saved
            True
        """
        checkpointing.load_state(self, input_dir, load_kwargs, load_model_func_kwargs)

    def resume(self) -> bool:
        """Loads the newest complete checkpoint of the project, if there is one.

        Call it after everything is prepared and registered, on all processes or on one process for itself. Scripts that
        call it can be restarted.

        Returns:
            Whether there was one. If not, nothing has changed.

        Raises:
            ValueError: the project does not number its checkpoints, or has some, but none is complete.
            CheckpointError: as :meth:`load_state`.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> from accelerate_cpp.utils import ProjectConfiguration
            >>> project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
            >>> accelerator = Accelerator(project_config=project)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> accelerator.resume()  # there is no checkpoint yet
            False
            >>> accelerator.save_state().name
            'checkpoint_0'
            >>> accelerator.resume()
            True
        """
        return checkpointing.resume(self)

    def leave_if_preempted(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Saves a checkpoint and ends the program if a scheduler has told any of the processes that the run has to end.

        Call it on all processes where a checkpoint would be right, such as at the end of each step. Between
        micro-batches whose gradients are accumulated it does nothing, as checkpoints hold no gradients. The first call
        makes the process remember SIGTERM and SIGUSR1, as Kubernetes and Slurm send them some time before they end a
        run, instead of ending by them.

        Args:
            output_dir: as in :meth:`save_state`.

        Raises:
            InvalidArgument: at the first call, without a notice, what :meth:`save_state` would raise for its folder.
            SystemExit: with exit code 75 (``EX_TEMPFAIL``), after the checkpoint is complete on all processes; a
                launch whose workers all leave so ends with 75, and schedulers can start it again on that.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> for step in range(3):
            ...     accelerator.leave_if_preempted("checkpoint")  # nobody has told us to end
        """
        if not preemption.is_listening():
            checkpointing.check_target(self, output_dir)  # a notice leaves no time to mend this
            preemption.listen()
        if not self.sync_gradients:
            return
        if not preemption.any_process_has_notice(self.num_processes, self._session.collective_device):
            return
        folder = self.save_state(output_dir)
        self.wait_for_everyone()
        if self.is_main_process:
            preemption.say_where(folder)
        preemption.ignore()
        raise SystemExit(preemption.REQUEUE)

    def wait_for_checkpoint(self) -> None:
        """Waits until no checkpoint is being written. If the last one failed, raises its error once.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> folder = accelerator.save_state("checkpoint", blocking=False)
            >>> accelerator.wait_for_checkpoint()
            >>> (folder / "accelerate_cpp.json").is_file()
            True
        """
        self._checkpoints.wait()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds ``objects`` to all checkpoints; ``ValueError`` if one lacks ``state_dict`` or ``load_state_dict``.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> class Progress:
            ...     steps = 0
            ...     def state_dict(self):
            ...         return {"steps": self.steps}
            ...     def load_state_dict(self, state):
            ...         self.steps = state["steps"]
            >>> progress = Progress()
            >>> accelerator.register_for_checkpointing(progress)
            >>> progress.steps = 100
            >>> folder = accelerator.save_state("checkpoint")
            >>> progress.steps = 0
            >>> accelerator.load_state("checkpoint")
            >>> progress.steps
            100
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls ``hook(models, weights, folder)`` in each :meth:`save_state`; weights that it removes from the list are
        not saved.

        Of models whose state is in shards, there are no weights in the list. Files that a hook writes appear at once,
        before the checkpoint is complete.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> from pathlib import Path
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> def note(models, weights, folder):
            ...     (Path(folder) / "note.txt").write_text(f"{len(models)} model")
            >>> hook = accelerator.register_save_state_pre_hook(note)
            >>> (accelerator.save_state("checkpoint") / "note.txt").read_text()
            '1 model'
            >>> hook.remove()
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls ``hook(models, folder)`` in each :meth:`load_state`; models that it removes are skipped.

        Models whose state is in shards (FSDP, ZeRO, engines of DeepSpeed) are not among them, and are loaded always.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> def tell(models, folder):
            ...     print(f"loads {len(models)} model")
            >>> hook = accelerator.register_load_state_pre_hook(tell)
            >>> folder = accelerator.save_state("checkpoint")
            >>> accelerator.load_state("checkpoint")
            loads 1 model
            >>> hook.remove()
        """
        return self._checkpoints.add_load_hook(hook)

    @property
    def should_save_model(self) -> bool:
        """Whether this process saves models on its host: rank 0 of the host."""
        return self.is_local_main_process

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Saves ``obj`` once, or once per host with ``save_on_each_node``; see :func:`accelerate_cpp.utils.save`.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.save({"threshold": torch.tensor(0.5)}, "settings.pt")  # on one process only
            >>> torch.load("settings.pt")
            {'threshold': tensor(0.5000)}
        """
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Saves the weights of ``model`` as ``model.safetensors``, or in shards with an index.

        Args:
            model: prepared or not.
            save_directory: a folder, which is created if necessary.
            max_shard_size: the largest size of one file, in bytes or as ``"5GB"``; a larger tensor gets its own file.
            safe_serialization: if false, pickles, ``pytorch_model*.bin``.

        Raises:
            ValueError: ``save_directory`` is a file.
            RuntimeError: parameters are on the meta device.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> from safetensors.torch import load_file
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> accelerator.save_model(model, "weights")
            >>> sorted(load_file("weights/model.safetensors"))
            ['bias', 'weight']
        """
        checkpointing.save_model(self, without_engine(model), save_directory, max_shard_size, safe_serialization)

    # Models and the end

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The module that was passed to :meth:`prepare`, still compiled if ``keep_torch_compile``.

        ``model`` itself does not change: it stays compiled and distributed.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator, debug_launcher
            >>> def work():
            ...     accelerator = Accelerator()
            ...     model = accelerator.prepare(torch.nn.Linear(2, 1))
            ...     return type(model).__name__, type(accelerator.unwrap_model(model)).__name__
            >>> debug_launcher(work, num_processes=2)[0]
            ('DataParallel', 'Linear')
        """
        return extract_model_from_parallel(without_engine(model), keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full state dict of ``model``, under the user's own names if ``unwrap``.

        Of a model in shards, rank 0 gets it, on the CPU, and the others get an empty one; all have to call.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> sorted(accelerator.get_state_dict(model))
            ['bias', 'weight']
        """
        strategy, model = self._session.strategy, without_engine(model)
        if not unwrap and not strategy.in_shards(model):
            return model.state_dict()
        return strategy.model_state(model, here=self.is_main_process)

    def free_memory(self, *objects: Any) -> list[None]:
        """Drops all references to prepared objects, and frees memory that nothing else uses.

        Returns:
            One ``None`` for each of ``objects``: ``model, optimizer = accelerator.free_memory(model, optimizer)`` drops
            the caller's own references.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(2, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
            >>> print(model, optimizer)
            None None
        """
        self._session.strategy.release(self._models)
        self._prepared = Bundle()
        self._engine = None
        self._has_stepped = False
        self._checkpoints.release_memory()
        self.step = 0
        freed = [None] * len(objects)
        del objects
        release_cache(self.device)
        return freed

    def clear(self, *objects: Any) -> list[None]:
        """The same as :meth:`free_memory`.

        Example:
            >>> import torch
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> (model,) = accelerator.clear(model)
            >>> print(model)
            None
        """
        return self.free_memory(*objects)

    # Experiment trackers

    @property
    def log_with(self) -> list[Any]:
        """The requested trackers that can be used: members of ``LoggerType``, names and objects."""
        return self._trackers.requested

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that log on this process; none before :meth:`init_trackers`."""
        return self._trackers.active

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._trackers.active = trackers

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """``init_trackers(project_name, config=None, init_kwargs=None)`` starts the trackers of ``log_with``.

        They log on the main process, unless their ``main_process_only`` is ``False``.

        Args:
            project_name: the project, or the run, for trackers that were requested by name.
            config: hyperparameters, stored by every tracker.
            init_kwargs: options by name of the tracker: ``{"wandb": {"entity": "my-team"}}``.

        Raises:
            ValueError: the trackers are running already.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="run")
            >>> accelerator.init_trackers("digits", config={"lr": 0.01, "batch_size": 64})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        self._trackers.start(self.logging_dir, *args, **kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker ``name``, or with ``unwrap`` the object of its library.

        On processes that do not log, it returns an object whose methods may all be called and have no effect.

        Raises:
            ValueError: there are trackers, but none of this name.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="run")
            >>> accelerator.init_trackers("digits")
            >>> type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__
            'SummaryWriter'
            >>> accelerator.end_training()
        """
        return self._trackers.find(name, unwrap)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """``log(values, step=None, log_kwargs=None)`` logs with every tracker.

        Args:
            values: names with values; numbers, and tensors with one element, are understood by all trackers.
            step: the step to which the values belong.
            log_kwargs: options by name of the tracker: ``{"wandb": {"commit": False}}``.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> from accelerate_cpp.tracking import GeneralTracker
            >>> class Screen(GeneralTracker):
            ...     name = "screen"
            ...     requires_logging_directory = False
            ...     tracker = None
            ...     def store_init_configuration(self, values):
            ...         pass
            ...     def log(self, values, step=None, **kwargs):
            ...         print(step, values)
            >>> accelerator = Accelerator(log_with=Screen())
            >>> accelerator.init_trackers("digits")
            >>> accelerator.log({"loss": 0.5}, step=1)
            1 {'loss': 0.5}
        """
        self._trackers.log(*args, **kwargs)

    def end_training(self) -> None:
        """Waits for checkpoints, finishes the trackers, and waits for every process.

        Process groups are destroyed when the interpreter exits.

        Example:
            >>> from accelerate_cpp import Accelerator
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="run")
            >>> accelerator.init_trackers("digits")
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()  # the last line of a script
        """
        try:
            self.wait_for_checkpoint()
        finally:
            self._checkpoints.release_memory()
            self._trackers.finish()
        self.wait_for_everyone()
