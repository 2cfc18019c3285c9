"""The state classes: views of the current session and of the current gradient accumulation.

All instances of a class share their state. Creating the first ``PartialState`` connects the processes and picks the
device; ``AcceleratorState`` adds the precision; ``GradientState`` shows the position of a run between two optimizer
steps.
"""

from __future__ import annotations

import copyreg
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import env_table, unsupported
from accelerate_cpp.config.compile import compile_downcast, compile_precision, compile_process, freeze
from accelerate_cpp.config.session_config import AccumulationConfig, SessionConfig
from accelerate_cpp.devices.selection import available_accelerators, select_device
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.deepspeed.library import require_library
from accelerate_cpp.plugins import fsdp
from accelerate_cpp.plugins.data_parallelism import (
    PluginViews,
    announce_sharding,
    chosen_fsdp_plugin,
    chosen_parallelism,
    mesh_axes,
    num_processes,
    split_sequences,
    with_tensor_plugin,
    withdraw_sharding,
)
from accelerate_cpp.plugins.deepspeed_choice import (
    adopt_precision,
    chosen_deepspeed_plugins,
    precision_in,
    tensor_axes,
)
from accelerate_cpp.plugins.enums import DistributedType, type_of_several_processes
from accelerate_cpp.plugins.fp8_recipes import Recipe
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.handlers import DistributedDataParallelKwargs, InitProcessGroupKwargs, KwargsHandler
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.plugins.megatron_mesh import MeshOfMegatron, chosen_megatron_plugin, mesh_of_megatron
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.gradient_state import GradientState
from accelerate_cpp.runtime.processes import Processes
from accelerate_cpp.runtime.session import Remembered, Session, build_session, remember
from accelerate_cpp.utils.dataclasses import TorchDynamoPlugin

__all__ = ["AcceleratorState", "GradientState", "PartialState"]

__getattr__ = lending("state")


def enter_session(config: SessionConfig) -> Session:
    """Makes the session of ``config`` the current one; processes and device of an existing session are kept."""
    if current.session is None:
        current.session = build_session(config)
    elif current.session.config != config:
        current.session = current.session.reconfigured(config)
    PartialState._shared_state["session"] = current.session
    if config.mixed_precision is not None:
        AcceleratorState._shared_state["session"] = current.session
    return current.session


def _session_here() -> Session | None:
    return current.session


def _device_here() -> torch.device | None:
    return None if current.session is None else current.session.device


fsdp.device_of_run = _device_here


# Prepared objects and Accelerators that are pickled belong to the session of the process that loads them.
copyreg.pickle(Session, lambda _: (_session_here, ()))  # type: ignore[arg-type, return-value]


def view_of(kind: type[Any], remembered: Remembered | None) -> Any:
    """A state object that shows the session of this process without opening one."""
    view = object.__new__(kind)
    alone = current.session is None and remembered is not None
    view.__dict__ = {"_remembered": remembered} if alone else kind._shared_state
    return view


def is_initialized() -> bool:
    """Whether there is a session with a precision, as an ``Accelerator`` makes it."""
    return bool(AcceleratorState._shared_state)


class PartialState(Processes):
    """The processes of a run and their devices.

    The first instance connects the processes that the environment describes (``RANK``, ``WORLD_SIZE``, …); later ones
    and their arguments have no effect.

    Args:
        cpu: use the CPU even when an accelerator is present.
        kwargs: ``backend`` and ``timeout`` (a ``timedelta``) of the default process group.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        *("_cpu", "_mixed_precision", "_shared_state", "backend", "debug", "device", "distributed_type"),
        *("fork_launched", "local_process_index", "num_processes", "process_index"),
    ]
    """Attributes other than properties that are only missing after a reset, which the error then says."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if current.session is None:
            enter_session(compile_process(cpu=cpu, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy shows the session of the process that holds it; if there is none, that of this process."""
        return view_of, (type(self), remember(current.session or self.__dict__.get("_remembered")))

    @staticmethod
    def _reset_state() -> None:
        """Drops the session; the process group is kept, and the next state uses it again."""
        current.session = None
        PartialState._shared_state.clear()
        AcceleratorState._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        """Raises an error that says what is missing; called for unknown names, and for those that need a session."""
        if name in self._shared_state:
            return self._shared_state[name]
        owner = type(self).__name__
        known = name in self._known_attrs or isinstance(inspect.getattr_static(type(self), name, None), property)
        if known and not self.initialized:
            raise AttributeError(
                f"`{owner}` object has no attribute `{name}`. This happens if `{owner}._reset_state()` was called: "
                "create an Accelerator or a PartialState again"
            )
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    @property
    def _session(self) -> Session | Remembered:
        session: Session | Remembered | None = current.session or self.__dict__.get("_remembered")
        if session is None:
            raise AttributeError(f"{type(self).__name__} was reset by _reset_state()")
        return session

    @property
    def initialized(self) -> bool:
        """Whether there is a session."""
        return current.session is not None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def default_device(self) -> torch.device:
        """The device that is chosen by default."""
        return select_device(cpu=False, forced=None, local_rank=self.local_process_index)

    def set_device(self) -> None:
        """Makes the device of this process torch's current device again, if it is a GPU.

        Raises:
            AttributeError: the state was reset.
        """
        select_device(cpu=self._cpu, forced=str(self.device), local_rank=self.local_process_index)

    @property
    def backend(self) -> str | None:
        """The communication backend, for example ``"shm"``; ``None`` without a process group."""
        return self._session.topology.backend

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run: ``NO`` for one process, otherwise according to the kind of device."""
        session = self._session
        if session.config.uses_deepspeed or env_table.USE_DEEPSPEED.get():
            return DistributedType.DEEPSPEED
        alone = session.topology.world_size == 1 and not kind_of(session.device).counts_alone
        return DistributedType.NO if alone else type_of_several_processes(session.device)

    @property
    def num_processes(self) -> int:
        """The number of processes on all hosts."""
        return self._session.topology.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return self._session.topology.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return self._session.topology.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

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

    @property
    def debug(self) -> bool:
        """Whether collectives first compare the shapes of all ranks."""
        return self._session.config.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        if current.session is None:
            raise AttributeError("debug cannot be set of a state that was reset: create an Accelerator again")
        current.session = replace(current.session, config=replace(current.session.config, debug=debug))

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """The backend (``backend`` or that of the run) and the kind of run; the arguments no longer choose anything."""
        return backend or self.backend, self.distributed_type

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher forked this process."""
        return self._session.config.fork_launched

    @property
    def _cpu(self) -> bool:
        return self._session.config.cpu

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type.value}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PluginViews, PartialState):
    """The state of a run with a fixed precision.

    Args:
        mixed_precision: as for ``Accelerator``; ``None`` uses ``ACCELERATE_MIXED_PRECISION``, or the precision that is
            already set.
        cpu: use the CPU even when an accelerator is present.
        dynamo_plugin: how models are compiled from now on; ``None`` keeps the current plugin, or creates one from the
            variables ``ACCELERATE_DYNAMO_*``.
        deepspeed_plugin: trains through DeepSpeed, or several plugins by name; ``None`` keeps the current ones, or with
            ``ACCELERATE_USE_DEEPSPEED`` makes one from the variables ``ACCELERATE_DEEPSPEED_*``.
        fsdp_plugin: shards models; ``None`` keeps the current one, or with ``ACCELERATE_USE_FSDP`` makes one from the
            variables ``FSDP_*``.
        torch_tp_plugin: splits layers, where there is no ``parallelism_config``.
        megatron_lm_plugin: chooses the mesh and the shards; ``None`` keeps the current one, or with
            ``ACCELERATE_USE_MEGATRON_LM`` makes one from the variables ``MEGATRON_LM_*``.
        parallelism_config: the mesh of processes; ``None`` keeps the current one.
        kwargs: as for :class:`PartialState`.

    Raises:
        ValueError: the precision or the device differs from that of an existing state, or the value is not supported.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs,
        *("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "dynamo_plugin"),
    ]

    fsdp_plugin: FullyShardedDataParallelPlugin
    """How models are sharded; there is none where they are not."""
    megatron_lm_plugin: MegatronLMPlugin
    """How an engine as that of Megatron-LM trains; there is none where none does."""
    dynamo_plugin: TorchDynamoPlugin
    """How models are compiled; its values at the time of ``prepare`` are used."""

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        running = None if current.session is None else current.session.config
        has_state = running is not None and running.mixed_precision is not None
        engines = chosen_deepspeed_plugins(
            deepspeed_plugin, None if running is None else running.deepspeed_plugins, has_state
        )
        sharding = chosen_fsdp_plugin(fsdp_plugin, None if running is None else running.fsdp_plugin)
        if engines is not None and sharding is not None:
            raise InvalidArgument(
                "DeepSpeed and FSDP are both asked for (deepspeed_plugin or ACCELERATE_USE_DEEPSPEED, fsdp_plugin or "
                "ACCELERATE_USE_FSDP), and each shards the model; leave one of them out"
            )
        asked = with_tensor_plugin(parallelism_config, torch_tp_plugin)
        megatron = chosen_megatron_plugin(megatron_lm_plugin, None if running is None else running.megatron_plugin)
        if megatron is not None and not has_state:
            asked, sharding = self._of_megatron(megatron, cpu, asked, sharding, engines)
        parallelism = chosen_parallelism(
            asked,
            sharding if sharding is not None and sharding.shards else None,
            through_deepspeed=engines is not None,
        )
        axes = mesh_axes(sharding, parallelism) if engines is None else tensor_axes(engines, num_processes())
        plugin = dynamo_plugin or self._shared_state.get("dynamo_plugin") or TorchDynamoPlugin()
        if running is not None:
            self._require_agreement(current.session, mixed_precision, cpu, kwargs)
        if not has_state:
            unsupported.refuse_environment()
            precision = compile_precision(mixed_precision)
            downcast = compile_downcast(precision)
            if sharding is not None and sharding.stage is None and precision != "no":
                sharding.set_mixed_precision(precision)
            if engines is not None:
                require_library("DeepSpeedPlugin" if deepspeed_plugin is not None else env_table.USE_DEEPSPEED.name)
                adopt_precision(engines, precision)
            enter_session(
                replace(
                    running or compile_process(cpu=cpu, **kwargs),
                    mixed_precision=precision,
                    fsdp_plugin=sharding,
                    deepspeed_plugins=engines,
                    megatron_plugin=megatron,
                    sequences=None if engines is None else split_sequences(parallelism),
                    axes=freeze(axes),
                    parallelism=parallelism,
                    downcast_bf16=downcast,
                )
            )
        elif running is not None and megatron is not running.megatron_plugin:
            raise InvalidArgument(
                "megatron_lm_plugin: this process already has a state without this plugin, and all its models are "
                "prepared in one way; pass the plugin to the first Accelerator"
            )
        elif running is not None and sharding is not running.fsdp_plugin:
            raise InvalidArgument(
                "fsdp_plugin: this process already has a state without it, and all its models are prepared in one way; "
                "pass the plugin to the first Accelerator"
            )
        self.dynamo_plugin = plugin
        if sharding is not None and self.distributed_type == DistributedType.FSDP:
            self.fsdp_plugin = sharding
            announce_sharding()
        if engines is not None:
            self._deepspeed_plugins = engines
        if megatron is not None and self.distributed_type == DistributedType.MEGATRON_LM:
            megatron.set_mixed_precision(self.mixed_precision)
            self.megatron_lm_plugin = megatron
        self._keep_parallelism(parallelism)

    @staticmethod
    def _of_megatron(
        plugin: MegatronLMPlugin, cpu: bool, parallelism: Any, sharding: Any, engines: Any
    ) -> MeshOfMegatron:
        """The mesh and the shards that ``plugin`` asks for, which nothing else may ask for."""
        for name, found in (
            ("parallelism_config", parallelism or env_table.USE_PARALLELISM_CONFIG.get() or None),
            ("fsdp_plugin", sharding),
            ("deepspeed_plugin", engines),
        ):
            if found is not None:
                raise InvalidArgument(
                    f"megatron_lm_plugin (or ACCELERATE_USE_MEGATRON_LM) and {name} (or its variable) each say how "
                    "models are split over processes; leave one of them out"
                )
        if current.session is None:
            config = compile_process(cpu=cpu)
            on_cpu = config.cpu or (config.device or "").startswith("cpu") or not available_accelerators()
        else:
            on_cpu = current.session.device.type == "cpu"
        return mesh_of_megatron(plugin, num_processes(), on_cpu)

    def _require_agreement(self, session: Any, mixed_precision: str | None, cpu: bool, kwargs: dict[str, Any]) -> None:
        config, device = session.config, session.device
        chosen = config.mixed_precision
        differs = mixed_precision is not None and chosen is not None and str(mixed_precision) != chosen
        if differs and not config.uses_deepspeed:  # whose configuration decides
            raise InvalidArgument(
                f"mixed_precision={str(mixed_precision)!r}: this process already has a state with {chosen!r}, and a "
                "process can only have one precision; pass it to the first Accelerator, or restart"
            )
        if cpu and device.type != "cpu":
            raise InvalidArgument(
                f"cpu=True: this process already has a state on device {device}; pass it to the first state"
            )
        asked = compile_process(**kwargs)
        for name, running in (("timeout", config.timeout), ("backend", config.backend or session.topology.backend)):
            value = getattr(asked, name)
            if value is not None and value != running:
                warnings.warn(
                    f"{name}={value} has no effect: the processes are connected already; pass it to the first state",
                    stacklevel=3,
                )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Drops the precision; with ``reset_partial_state``, also the session."""
        AcceleratorState._shared_state.clear()
        withdraw_sharding()
        if current.session is not None:
            config = replace(
                current.session.config,
                mixed_precision=None,
                fp8=None,
                fsdp_plugin=None,
                deepspeed_plugins=None,
                megatron_plugin=None,
                sequences=None,
                axes=freeze(None),
                parallelism=None,
            )
            current.session = replace(current.session, config=config)
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def _session(self) -> Session | Remembered:
        session: Session | Remembered | None = current.session if self.initialized else self.__dict__.get("_remembered")
        if session is None:
            raise AttributeError("AcceleratorState was reset by _reset_state()")
        return session

    @property
    def initialized(self) -> bool:
        """Whether there is a session with a precision."""
        return current.session is not None and current.session.config.mixed_precision is not None

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run: ``NO`` for one process, ``FSDP`` if parameters are sharded, else by the kind of device.

        With a plugin for Megatron-LM, several processes are ``MEGATRON_LM``.
        """
        kind = super().distributed_type
        if kind != DistributedType.NO and self._session.config.uses_megatron:
            return DistributedType.MEGATRON_LM
        unchanged = kind in (DistributedType.NO, DistributedType.XLA)
        return DistributedType.FSDP if self._session.config.shards and not unchanged else kind

    @property
    def downcast_bfloat(self) -> bool:
        """Whether torch_xla stores floats in bf16."""
        return bool(self._session.config.downcast_bf16)

    @property
    def mixed_precision(self) -> str:
        """The precision of forward and backward passes."""
        precision = self._session.config.mixed_precision
        plugins = self.deepspeed_plugins
        return (precision if plugins is None else precision_in(plugins, precision)) or "no"

    def __repr__(self) -> str:
        described = f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        return described if plugin is None else f"{described}ds_config: {plugin.deepspeed_config}\n"


def precision_of_run(asked: str | None) -> str:
    """The precision that is already set if none is requested; otherwise the result of the request."""
    chosen = None if current.session is None else current.session.config.mixed_precision
    return chosen if chosen is not None and asked is None else compile_precision(asked)


def open_session(
    cpu: bool,
    mixed_precision: str | None,
    accumulation: AccumulationConfig,
    handlers: Mapping[type[KwargsHandler], Any],
    dynamo_plugin: TorchDynamoPlugin | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    parallelism_config: Any,
    deepspeed_plugins: Any = None,
    megatron_lm_plugin: Any = None,
) -> Session:
    """Creates the state of a run from the arguments of an ``Accelerator``, and makes its session the current one."""
    group = handlers.get(InitProcessGroupKwargs)
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        dynamo_plugin=dynamo_plugin,
        deepspeed_plugin=deepspeed_plugins,
        fsdp_plugin=fsdp_plugin,
        megatron_lm_plugin=megatron_lm_plugin,
        parallelism_config=parallelism_config,
        _from_accelerator=True,
        **({} if group is None else group.to_kwargs()),
    )
    ddp = handlers.get(DistributedDataParallelKwargs)
    recipe = next((handler for handler in handlers.values() if isinstance(handler, Recipe)), None)
    return enter_session(
        replace(
            cast(SessionConfig, state._session.config),
            accumulation=accumulation,
            ddp_kwargs=freeze(None if ddp is None else ddp.strategy_options()),
            fp8=None if recipe is None else recipe.fp8_config(),
        )
    )
