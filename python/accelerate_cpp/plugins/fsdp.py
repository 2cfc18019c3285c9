"""The plugin for torch's FSDP: which parameters are sharded, and how they are gathered, stored and saved."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from accelerate_cpp.config import env_table, plugin_variables
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins import fsdp_options
from accelerate_cpp.plugins.fsdp_options import FSDP_AUTO_WRAP_POLICY

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
        StateDictType,
    )

__all__ = ["FullyShardedDataParallelPlugin", "get_module_class_from_name"]

_logger = logging.getLogger(__name__)

_ALWAYS = (
    *("fsdp_version", "backward_prefetch", "cpu_offload", "ignored_modules", "state_dict_type", "auto_wrap_policy"),
    *("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"),
    *("weights_once_per_host", "zero_stage"),
)
_OF_VERSION_1 = ("use_orig_params", "sync_module_states", "forward_prefetch")


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """The class called ``name`` of ``module`` or of one of its submodules; ``None`` if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


@dataclass
class FullyShardedDataParallelPlugin:
    """How parameters, gradients and states of optimizers are sharded over the processes.

    Fields that are ``None`` are read from ``FSDP_*`` when the plugin is created; it may be changed until models are
    prepared. Options of version 1 are options of ``fully_shard`` by other names: an ``Accelerator`` shards by that, in
    both versions.

    Attributes:
        fsdp_version: 1 or 2: whether options are those of torch's ``FullyShardedDataParallel`` or ``fully_shard``.
        sharding_strategy: version 1: ``torch.distributed.fsdp.ShardingStrategy``, its name or number.
        reshard_after_forward: version 2: whether parameters are freed between the passes. Version 1: the newer name of
            ``sharding_strategy``.
        backward_prefetch: version 1: ``BackwardPrefetch``, its name, or ``"NO_PREFETCH"``.
        mixed_precision_policy: torch's ``MixedPrecision`` (1) or ``MixedPrecisionPolicy`` (2), a dict of its dtypes, or
            one name for all of them: fp16, bf16, fp32, or fp8, which means bf16 here.
        auto_wrap_policy: which modules are sharded on their own: ``"transformer_based_wrap"``, ``"size_based_wrap"``,
            ``"no_wrap"`` or a function of torch's form.
        cpu_offload: keep shards in the memory of the host: a flag, or torch's object.
        ignored_modules: modules that are not sharded, or a regular expression of their names.
        state_dict_type: of checkpoints: ``StateDictType`` or its name.
        state_dict_config, optim_state_dict_config: the options of that type; they follow the type unless they are
            given.
        limit_all_gathers: version 1: limit the memory of parameters that are gathered ahead.
        use_orig_params: version 1: show the parameters of the model to optimizers.
        param_init_fn: version 1: makes the parameters of a module that is on the meta device.
        sync_module_states: version 1: start from the parameters of rank 0.
        forward_prefetch: version 1: gather early what the forward pass needs next.
        activation_checkpointing: recompute activations in the backward pass.
        activation_checkpointing_offload: version 2: also keep its inputs on the host.
        cpu_ram_efficient_loading: transformers reads weights only on rank 0. If given, it is also written to
            ``FSDP_CPU_RAM_EFFICIENT_LOADING``, which transformers reads.
        transformer_cls_names_to_wrap: for ``"transformer_based_wrap"``, the names of classes, as a list or separated by
            commas; ``None`` uses those that a model of transformers names.
        weights_once_per_host: version 2, on CPUs, not in the original: the whole weights lie once in memory that all
            processes of a host have in common, and nothing is gathered there. Replicas of a model have one each.
        zero_stage: on CPUs, not in the original: 1, 2 or 3 for ZeRO by exchanges of this package, with the weights once
            per host. In stage 1 gradients stay whole while they accumulate; from stage 2 on, a process never holds more
            than its part and a few buckets. In version 1, ``sharding_strategy="SHARD_GRAD_OP"`` is stage 2.
        min_num_params: for ``"size_based_wrap"``, the least number of parameters.

    Raises:
        InvalidArgument: a value is not one of these, or not for this version.
    """

    fsdp_version: int | None = None
    sharding_strategy: str | ShardingStrategy | None = None
    reshard_after_forward: str | ShardingStrategy | bool | None = None
    backward_prefetch: str | BackwardPrefetch | None = None
    mixed_precision_policy: dict[str, torch.dtype] | str | MixedPrecision | MixedPrecisionPolicy | None = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: str | StateDictType | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None
    weights_once_per_host: bool | None = None
    zero_stage: int | None = None

    def __post_init__(self) -> None:
        if self.cpu_ram_efficient_loading is not None:
            loading = plugin_variables.FSDP["cpu_ram_efficient_loading"]
            env_table.export({loading: bool(self.cpu_ram_efficient_loading)})
        plugin_variables.fill(self, plugin_variables.FSDP, _ALWAYS)
        self.fsdp_version = _version(self.fsdp_version)
        _resolve_strategy(self)
        _resolve_prefetch(self)
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type()
        _resolve_wrapping(self)
        _resolve_precision(self)
        _resolve_checkpointing(self)
        _resolve_loading(self)
        _resolve_zero(self)

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO that trains on CPUs, if any."""
        shards_gradients = self.strategy_name == "SHARD_GRAD_OP" and self.mixed_precision_policy is None
        return 2 if shards_gradients and self.zero_stage is None else self.zero_stage

    @property
    def strategy_name(self) -> str | None:
        """In version 1, the name of ``sharding_strategy``."""
        strategy: Any = self.sharding_strategy
        return None if self.fsdp_version == 2 else str(strategy.name).lstrip("_")

    @property
    def shards(self) -> bool:
        """Whether parameters are shared out; every process keeps all of them with ``NO_SHARD`` of version 1."""
        return self.strategy_name != "NO_SHARD"

    @property
    def has_copies(self) -> bool:
        """Whether a strategy of version 1 makes copies, each in shards."""
        return self.strategy_name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

    @property
    def keeps_local_states(self) -> bool:
        """Whether checkpoints are to be as version 1 holds parameters in memory."""
        from torch.distributed.fsdp import StateDictType

        return self.state_dict_type is StateDictType.LOCAL_STATE_DICT

    def in_version_2(self) -> FullyShardedDataParallelPlugin:
        """The plugin of version 2 that trains alike: a copy, or this one if it is of that version."""
        if self.fsdp_version == 2:
            return self
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        precision: Any = self.mixed_precision_policy
        offload: Any = self.cpu_offload
        other = copy.copy(self)
        other.fsdp_version = 2
        other.zero_stage = self.stage
        other.sharding_strategy = None
        other.reshard_after_forward = self.strategy_name in ("FULL_SHARD", "HYBRID_SHARD")
        other.cpu_offload = CPUOffloadPolicy() if offload.offload_params else OffloadPolicy()
        other.mixed_precision_policy = precision and cast(
            "MixedPrecisionPolicy", fsdp_options.new_policy(2, precision.param_dtype, precision.reduce_dtype, None)
        )
        return other

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Chooses the type of checkpoints, ``state_dict_type`` or the field, and the options of that type.

        Options that the user has passed are kept.

        Raises:
            InvalidArgument: there is no such type in this version.
        """
        from torch.distributed.fsdp import StateDictType

        asked = self.state_dict_type if state_dict_type is None else state_dict_type
        if asked is None:
            asked = "SHARDED_STATE_DICT" if self.fsdp_version == 2 else "FULL_STATE_DICT"
        chosen = fsdp_options.member_of(StateDictType, asked, "state_dict_type")
        if self.fsdp_version == 2 and chosen is StateDictType.LOCAL_STATE_DICT:
            raise InvalidArgument(
                "FullyShardedDataParallelPlugin: version 2 has no LOCAL_STATE_DICT; choose SHARDED_STATE_DICT or "
                "FULL_STATE_DICT"
            )
        self.state_dict_type = chosen
        own = fsdp_options.default_state_dict_configs()
        of_model, of_optimizer = own.get(chosen, (None, None))
        if self.state_dict_config is None or self.state_dict_config in [model for model, _ in own.values()]:
            self.state_dict_config = of_model
        if self.optim_state_dict_config is None or self.optim_state_dict_config in [opt for _, opt in own.values()]:
            self.optim_state_dict_config = of_optimizer

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Replaces an ``auto_wrap_policy`` that was given by name with one for ``model``.

        Raises:
            InvalidArgument: ``model`` has no layer of a class to be wrapped.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or [])
            classes = {class_to_wrap(model, name) for name in self.transformer_cls_names_to_wrap}
            self.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            smallest = self.min_num_params or 0
            self.auto_wrap_policy = (
                functools.partial(size_based_auto_wrap_policy, min_num_params=smallest) if smallest > 0 else None
            )

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype | None, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Chooses the dtype in which parameters are gathered and gradients averaged, unless one is already set.

        Args:
            mixed_precision: fp16, bf16, fp32, fp8 (which means bf16 here) or a dtype of torch.
            buffer_autocast: version 1: leave buffers in fp32, where autocast casts them.
            override: replace one that is already set.

        Raises:
            InvalidArgument: another name.
        """
        dtype = fsdp_options.dtype_of(mixed_precision)
        last = torch.float32 if buffer_autocast and self.fsdp_version != 2 else dtype
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = fsdp_options.new_policy(cast(int, self.fsdp_version), dtype, dtype, last)

    def validate_mixed_precision_policy(self) -> None:
        """Refuses a ``mixed_precision_policy`` of another version of FSDP."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        version = cast(int, self.fsdp_version)
        kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
        fsdp_options.require_instance(self.mixed_precision_policy, kind, "mixed_precision_policy", version)

    def set_cpu_offload(self) -> None:
        """Replaces ``cpu_offload``, if it is a flag, with the object that this version of FSDP expects."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 2:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
            else:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Refuses a ``cpu_offload`` of another version of FSDP."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        version = cast(int, self.fsdp_version)
        kind = OffloadPolicy if version == 2 else CPUOffload
        fsdp_options.require_instance(self.cpu_offload, kind, "cpu_offload", version)


def _version(found: Any) -> int:
    if str(found) not in ("1", "2"):
        raise InvalidArgument(f"FullyShardedDataParallelPlugin: fsdp_version={found!r}; expected 1 or 2")
    return int(found)


def _resolve_strategy(plugin: FullyShardedDataParallelPlugin) -> None:
    """Sets ``sharding_strategy`` in version 1 and ``reshard_after_forward`` in version 2."""
    if plugin.fsdp_version == 2:
        _resolve_resharding(plugin)
        return
    from torch.distributed.fsdp import ShardingStrategy

    reshard = plugin.reshard_after_forward
    if isinstance(reshard, bool):
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: reshard_after_forward={reshard}; in version 1 expected the name of a "
            "strategy, such as FULL_SHARD, or fsdp_version=2"
        )
    if reshard is not None:
        plugin.reshard_after_forward = fsdp_options.member_of(ShardingStrategy, reshard, "reshard_after_forward")
    if plugin.sharding_strategy is not None:
        _logger.warning("sharding_strategy is the old name of reshard_after_forward")
    asked = plugin.sharding_strategy or plugin_variables.FSDP["sharding_strategy"].get()
    asked = asked or plugin.reshard_after_forward or ShardingStrategy.FULL_SHARD
    plugin.sharding_strategy = fsdp_options.member_of(ShardingStrategy, asked, "sharding_strategy")


def _resolve_resharding(plugin: FullyShardedDataParallelPlugin) -> None:
    if plugin.sharding_strategy is not None:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: sharding_strategy={plugin.sharding_strategy!r} belongs to version 1; in "
            "version 2 pass reshard_after_forward=True, which shards like FULL_SHARD, or False, like SHARD_GRAD_OP"
        )
    found: Any = plugin.reshard_after_forward
    if found is None:
        found = plugin_variables.FSDP["reshard_after_forward"].get()
    try:
        plugin.reshard_after_forward = (
            True if found is None else env_table.parse_flag(found) if isinstance(found, str) else _flag(found)
        )
    except ValueError:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: reshard_after_forward={found!r}; expected true or false in version 2"
        ) from None


def _flag(found: Any) -> bool:
    if not isinstance(found, bool):
        raise ValueError("expected a flag")
    return found


def _resolve_prefetch(plugin: FullyShardedDataParallelPlugin) -> None:
    """Sets when parameters are gathered ahead, and the other options of version 1."""
    from torch.distributed.fsdp import BackwardPrefetch

    prefetch = plugin.backward_prefetch
    if isinstance(prefetch, str) and prefetch.upper() == "NO_PREFETCH":
        plugin.backward_prefetch = None
    elif prefetch is not None:
        plugin.backward_prefetch = fsdp_options.member_of(BackwardPrefetch, prefetch, "backward_prefetch")
    if plugin.fsdp_version == 1:
        plugin_variables.fill(plugin, plugin_variables.FSDP, _OF_VERSION_1)
        return
    if plugin.forward_prefetch is not None:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: forward_prefetch={plugin.forward_prefetch!r} belongs to version 1; leave "
            "it out, or pass fsdp_version=1"
        )
    for name in ("backward_prefetch", "use_orig_params", "sync_module_states"):
        if getattr(plugin, name) is not None:
            warnings.warn(f"{name} has no effect in version 2 of FSDP; leave it out", stacklevel=5)
            setattr(plugin, name, None)


def _resolve_wrapping(plugin: FullyShardedDataParallelPlugin) -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy = plugin.auto_wrap_policy
    if callable(policy):
        return
    if not isinstance(policy, str) or policy.upper() not in FSDP_AUTO_WRAP_POLICY:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: auto_wrap_policy={policy!r}; expected one of "
            f"{', '.join(FSDP_AUTO_WRAP_POLICY)}, or a function"
        )
    plugin.auto_wrap_policy = None
    if policy.upper() == "TRANSFORMER_BASED_WRAP":
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin_variables.fill(plugin, plugin_variables.FSDP, ["transformer_cls_names_to_wrap"])
        names = plugin.transformer_cls_names_to_wrap
        if isinstance(names, str):
            plugin.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",")]
    elif policy.upper() == "SIZE_BASED_WRAP":
        plugin.auto_wrap_policy = size_based_auto_wrap_policy
        plugin_variables.fill(plugin, plugin_variables.FSDP, ["min_num_params"])
        if not isinstance(plugin.min_num_params, int):
            raise InvalidArgument(
                f"FullyShardedDataParallelPlugin: min_num_params={plugin.min_num_params!r}; expected an integer"
            )


def _resolve_precision(plugin: FullyShardedDataParallelPlugin) -> None:
    policy = plugin.mixed_precision_policy
    if policy is None:
        return
    if isinstance(policy, dict):
        plugin.mixed_precision_policy = fsdp_options.policy_of_dict(cast(int, plugin.fsdp_version), policy)
    elif isinstance(policy, str):
        plugin.set_mixed_precision(policy, override=True)
    plugin.validate_mixed_precision_policy()


def _resolve_checkpointing(plugin: FullyShardedDataParallelPlugin) -> None:
    if not plugin.activation_checkpointing_offload:
        return
    if not plugin.activation_checkpointing or plugin.fsdp_version != 2:
        raise InvalidArgument(
            "FullyShardedDataParallelPlugin: activation_checkpointing_offload=True needs activation_checkpointing=True "
            "and fsdp_version=2"
        )


def _resolve_zero(plugin: FullyShardedDataParallelPlugin) -> None:
    stage = plugin.zero_stage
    if stage is None:
        return
    if stage not in (1, 2, 3):
        raise InvalidArgument(f"FullyShardedDataParallelPlugin: zero_stage={stage!r}; expected 1, 2 or 3")
    if plugin.fsdp_version != 2:
        raise InvalidArgument(f"FullyShardedDataParallelPlugin: zero_stage={stage} needs fsdp_version=2")
    if plugin.mixed_precision_policy is not None:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: zero_stage={stage} keeps weights as they are stored, and layers compute "
            "by autocast; leave mixed_precision_policy out and pass mixed_precision to Accelerator"
        )


def _resolve_loading(plugin: FullyShardedDataParallelPlugin) -> None:
    """If only rank 0 reads weights, the others get theirs from it, into the tensors that ``param_init_fn`` creates."""
    if plugin.fsdp_version == 2:
        return
    if plugin.weights_once_per_host:
        raise InvalidArgument("FullyShardedDataParallelPlugin: weights_once_per_host=True needs fsdp_version=2")
    if plugin.cpu_ram_efficient_loading and not plugin.sync_module_states:
        warnings.warn("cpu_ram_efficient_loading needs sync_module_states, which is switched on", stacklevel=4)
        plugin.sync_module_states = True
    if plugin.sync_module_states and plugin.param_init_fn is None:
        plugin.param_init_fn = _allocate


def _no_run() -> torch.device | None:
    return None


device_of_run: Callable[[], torch.device | None] = _no_run
"""The device of this process in the run, ``None`` before there is one; what opens runs puts its answer here."""


def _allocate(module: torch.nn.Module) -> torch.nn.Module:
    """Gives a module on the meta device memory on the device of this process."""
    return module.to_empty(device=device_of_run() or torch.accelerator.current_accelerator() or torch.device("cpu"))


def class_to_wrap(model: torch.nn.Module, name: str) -> type[torch.nn.Module]:
    """The class called ``name`` of a layer of ``model``; ``InvalidArgument`` if there is none."""
    found = get_module_class_from_name(model, name)
    if found is None:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: transformer_cls_names_to_wrap has {name!r}, but {type(model).__name__} "
            "has no layer of that class"
        )
    return found
