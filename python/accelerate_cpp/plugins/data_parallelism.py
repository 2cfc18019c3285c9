"""The parallelism of a run, as its plugins ask for it, and the answers of its state about all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate_cpp.comm.topology import world_size
from accelerate_cpp.config import env_table, unsupported
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.combinations import require_legal
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin, active_plugin
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.parallelism import DeepSpeedSequenceParallelConfig, TorchTensorParallelPlugin
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "PluginViews",
    "announce_sharding",
    "chosen_fsdp_plugin",
    "chosen_parallelism",
    "mesh_axes",
    "num_processes",
    "rank_along",
    "split_sequences",
    "with_tensor_plugin",
    "withdraw_sharding",
]


def chosen_parallelism(
    config: Any, sharding: FullyShardedDataParallelPlugin | None, through_deepspeed: bool = False
) -> ParallelismConfig | None:
    """``config``, or with ``ACCELERATE_USE_PARALLELISM_CONFIG`` one of variables, if a run can train on its mesh.

    Args:
        sharding: how parameters are sharded; ``None`` where they are not.
        through_deepspeed: whether DeepSpeed trains, which can also split sequences.

    Raises:
        InvalidArgument: it is no configuration, or one that is not for the number of processes or cannot be combined.
    """
    if config is None and env_table.USE_PARALLELISM_CONFIG.get():
        config = ParallelismConfig()
    if config is None:
        return None
    if not isinstance(config, ParallelismConfig):
        raise InvalidArgument(f"parallelism_config={config!r}: expected a ParallelismConfig")
    require_legal(config, num_processes(), sharding, through_deepspeed)
    return config


def with_tensor_plugin(config: Any, plugin: Any) -> Any:
    """``config``, or without one what a ``TorchTensorParallelPlugin`` asks for.

    Raises:
        InvalidArgument: ``plugin`` is none.
    """
    if plugin is not None and not isinstance(plugin, TorchTensorParallelPlugin):
        raise InvalidArgument(f"torch_tp_plugin={plugin!r}: expected a TorchTensorParallelPlugin")
    return ParallelismConfig(tp_size=plugin.tp_size) if config is None and plugin is not None else config


def chosen_fsdp_plugin(
    argument: Any, running: FullyShardedDataParallelPlugin | None
) -> FullyShardedDataParallelPlugin | None:
    """The plugin of a run: the argument, else the one that the run has, else with ``ACCELERATE_USE_FSDP`` a new one.

    Raises:
        InvalidArgument: the argument is no plugin.
    """
    if argument is None:
        if running is not None or not env_table.USE_FSDP.get():
            return running
        argument = FullyShardedDataParallelPlugin()
    if not isinstance(argument, FullyShardedDataParallelPlugin):
        raise InvalidArgument(f"fsdp_plugin={argument!r}: expected a FullyShardedDataParallelPlugin")
    return argument


def mesh_axes(plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig | None) -> dict[str, int] | None:
    """The axes of the mesh: those of ``config``, or of a hybrid strategy of ``plugin``, with a copy per host.

    Returns:
        ``None`` if nobody asks for any.

    Raises:
        InvalidArgument: with several processes: hosts have different numbers of them, or states are to be saved in a
            form that nothing reads.
    """
    processes = num_processes()
    if plugin is not None and plugin.keeps_local_states and processes > 1:
        unsupported.refuse("fsdp_local_state", "FullyShardedDataParallelPlugin(state_dict_type='LOCAL_STATE_DICT')")
    if config is not None:
        return config.axes()
    if plugin is None or not plugin.has_copies:
        return None
    shards = env_table.LOCAL_WORLD_SIZE.get() or processes
    if processes % shards:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: sharding_strategy={plugin.strategy_name!r} makes a copy per host, but "
            f"{processes} processes are not divisible by the {shards} of this host; pass "
            "parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
        )
    return {"dp_replicate": processes // shards, "dp_shard": shards}


def split_sequences(config: ParallelismConfig | None) -> tuple[int, DeepSpeedSequenceParallelConfig] | None:
    """The number of processes over which DeepSpeed splits sequences, and how; ``None`` where it does not."""
    size = 1 if config is None else int(config.sp_size or 1)
    if config is None or size == 1:
        return None
    return size, config.sp_handler or DeepSpeedSequenceParallelConfig()


_announced = False


def announce_sharding() -> None:
    """Sets ``ACCELERATE_USE_FSDP``, as the original does: transformers reads it to load weights on rank 0 alone."""
    global _announced
    if not env_table.USE_FSDP.get():
        env_table.export({env_table.USE_FSDP: True})
        _announced = True


def withdraw_sharding() -> None:
    """Takes back what :func:`announce_sharding` has set, so that the next run of this process need not be sharded."""
    global _announced
    if _announced:
        env_table.withdraw(env_table.USE_FSDP)
    _announced = False


def num_processes() -> int:
    """The number of processes, also before they are connected."""
    return max(world_size(), int(env_table.WORLD_SIZE.get() or 1))


def rank_along(config: ParallelismConfig | None, mesh: DeviceMesh | None, dimension: str) -> int:
    """The index of this process along a dimension of the mesh; 0 if that has one process.

    Raises:
        InvalidArgument: the run has no parallelism configuration.
    """
    if config is None:
        raise InvalidArgument(
            f"this run has no dimension {dimension}, because it has no mesh; pass a ParallelismConfig to Accelerator, "
            "or use process_index"
        )
    return 0 if mesh is None or dimension not in config.active_mesh_dims else int(mesh.get_local_rank(dimension))


class PluginViews:
    """The attributes of an ``AcceleratorState`` for plugins and for the mesh."""

    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device: ...

    parallelism_config: ParallelismConfig | None
    """The configuration that was passed, if any."""
    device_mesh: DeviceMesh | None
    """The mesh of ``parallelism_config``, if one of its dimensions has several processes."""

    def _keep_parallelism(self, config: ParallelismConfig | None) -> None:
        """Stores ``config``, or keeps the previous one, and creates its mesh, if any, which is a collective."""
        kept = config or self.__dict__.get("parallelism_config")
        self.parallelism_config = kept
        self.device_mesh = None if kept is None else kept.get_device_mesh(self.device.type)

    @property
    def deepspeed_plugins(self) -> DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None:
        """The plugin that was passed, or the dict of several; ``None`` where DeepSpeed does not train."""
        return self.__dict__.get("_deepspeed_plugins")

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected plugin; ``None`` where DeepSpeed does not train."""
        return None if self.deepspeed_plugins is None else active_plugin(self.deepspeed_plugins)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """The plugin of several that has this name.

        Raises:
            InvalidArgument: there is none.
        """
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, Mapping) or name not in plugins:
            found = "one plugin without a name" if isinstance(plugins, DeepSpeedPlugin) else sorted(plugins or ())
            raise InvalidArgument(
                f"no plugin of DeepSpeed is called {name!r}; the run has {found or 'none'}: pass "
                "deepspeed_plugins={name: DeepSpeedPlugin(...)} to the first Accelerator"
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Selects one of several plugins, by which models are created and prepared from now on.

        Raises:
            InvalidArgument: none has this name.
        """
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values() if isinstance(self.deepspeed_plugins, Mapping) else ():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def torch_tp_plugin(self) -> None:
        """Always ``None``, as in the original: what such a plugin asks for is in ``parallelism_config``."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by ``fully_shard``."""
        plugin = self.__dict__.get("fsdp_plugin")
        return plugin is not None and plugin.fsdp_version == 2
