"""The frozen description of a run: the result of arguments, plugins and environment in their order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class AccumulationConfig:
    """How micro-batches become optimizer steps.

    Attributes:
        num_steps: micro-batches per optimizer step, at least 1.
        adjust_scheduler: count micro-batches without a step in the scheduler's own step count.
        sync_with_dataloader: synchronise on a loader's last batch, whatever the count.
        sync_each_batch: reduce gradients in every backward pass, and still step only every ``num_steps``.
    """

    num_steps: int = 1
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass(frozen=True)
class Fp8Config:
    """Which library trains in fp8, and how.

    Attributes:
        backend: a key of :data:`accelerate_cpp.config.fp8.LIBRARIES`.
        options: what the library is given, by its own names.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class DynamoConfig:
    """How the models of one ``prepare`` call are compiled; no part of a session, as plugins may change between calls.

    Attributes:
        options: arguments of ``torch.compile``.
        by_region: compile repeated blocks one by one, of which those that are alike share one compilation.
    """

    options: Mapping[str, Any]
    by_region: bool = False


@dataclass(frozen=True)
class SessionConfig:
    """Everything that a session is built from.

    Attributes:
        cpu: train on the CPU even when an accelerator is present.
        device: the device asked for by name, for example ``"cuda:1"``; ``None`` leaves the choice to the local rank.
        backend: the process-group backend asked for; ``None`` picks one for the device.
        timeout: of every collective; ``None`` means the default of the process group.
        mixed_precision: ``None`` as long as no ``AcceleratorState`` has set it.
        fp8: set where ``mixed_precision`` is ``"fp8"`` and an ``Accelerator`` has set the recipe.
        accumulation: see :class:`AccumulationConfig`.
        ddp_kwargs: options of data parallelism that the user set, by their ``DistributedDataParallel`` names.
        fsdp_plugin: how models are sharded; ``None`` where they are not. It may be changed until models are prepared.
        deepspeed_plugins: one plugin of DeepSpeed, or several by name; ``None`` trains without it.
        megatron_plugin: the plugin for Megatron-LM, which has chosen the mesh and the shards; ``None`` without it.
        sequences: the number of processes over which DeepSpeed splits sequences, and how; ``None`` where it does not.
        axes: the sizes of the mesh that the user asked for; none for data parallelism over all processes.
        parallelism: the ``ParallelismConfig`` that the user passed, for the options of its axes.
        debug: compare the shapes of collectives over the ranks before running them.
        fork_launched: this process was forked by a notebook launcher.
        cpu_affinity: pin this process to its share of the cores of its host.
        downcast_bf16: torch_xla stores floats in bf16, so that nothing is left to cast.
    """

    cpu: bool = False
    device: str | None = None
    backend: str | None = None
    timeout: timedelta | None = None
    mixed_precision: str | None = None
    fp8: Fp8Config | None = None
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    ddp_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    fsdp_plugin: Any = None
    deepspeed_plugins: Any = None
    megatron_plugin: Any = None
    sequences: tuple[int, Any] | None = None
    axes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    parallelism: Any = None
    debug: bool = False
    fork_launched: bool = False
    cpu_affinity: bool = False
    downcast_bf16: bool = False

    @property
    def uses_deepspeed(self) -> bool:
        """Whether engines of DeepSpeed train."""
        return self.deepspeed_plugins is not None

    @property
    def uses_megatron(self) -> bool:
        """Whether models are trained by an engine as that of Megatron-LM."""
        return self.megatron_plugin is not None

    @property
    def casting_precision(self) -> str | None:
        """The precision to which this package casts; engines of DeepSpeed do that themselves, but for fp8."""
        cast_elsewhere = self.uses_deepspeed or self.downcast_bf16
        return "no" if cast_elsewhere and self.mixed_precision not in (None, "fp8") else self.mixed_precision

    @property
    def shards(self) -> bool:
        """Whether parameters are shared out over the processes, if there are several."""
        return self.fsdp_plugin is not None and self.fsdp_plugin.shards
