"""The parallelism that runs support, plain data parallelism, and the answers of their state about all other kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from accelerate_cpp.comm.topology import world_size
from accelerate_cpp.config import env_table, unsupported
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PluginViews", "rank_along", "require_plain"]


def require_plain(config: Any) -> ParallelismConfig | None:
    """``config``, if it only requests copies of the model, one in all or one per process.

    Raises:
        InvalidArgument: it requests another kind of parallelism or another number of copies, or is not a configuration.
    """
    if config is None:
        return None
    if not isinstance(config, ParallelismConfig):
        raise InvalidArgument(f"parallelism_config={config!r}: expected a ParallelismConfig")
    sizes = {f"{name}_size": getattr(config, f"{name}_size") for name in config.active_mesh_dims}
    copies, processes = sizes.pop("dp_replicate_size", 1), _processes()
    if sizes:
        found = ", ".join(f"{name}={size}" for name, size in sizes.items())
        unsupported.refuse("parallelism_config", f"parallelism_config=ParallelismConfig({found})")
    if copies not in (1, processes):
        raise InvalidArgument(
            f"parallelism_config: dp_replicate_size={copies}, but there are {processes} processes, each with a copy of "
            f"the model; expected {processes}, or leave it out"
        )
    return config


def _processes() -> int:
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
    """The configuration that was passed, if any. It always means plain data parallelism."""
    device_mesh: DeviceMesh | None
    """The mesh, if ``parallelism_config`` explicitly requests copies."""

    def _keep_parallelism(self, config: ParallelismConfig | None) -> None:
        """Stores ``config``, or keeps the previous one, and creates its mesh, if any, which is a collective."""
        kept = config or self.__dict__.get("parallelism_config")
        self.parallelism_config = kept
        self.device_mesh = None if kept is None else kept.get_device_mesh(self.device.type)

    @property
    def deepspeed_plugins(self) -> None:
        """Always ``None``: training through DeepSpeed is refused."""
        return None

    @property
    def deepspeed_plugin(self) -> None:
        """Always ``None``: training through DeepSpeed is refused."""
        return None

    def get_deepspeed_plugin(self, name: str) -> NoReturn:
        """Raises ``InvalidArgument``, because there is no plugin."""
        raise InvalidArgument(f"get_deepspeed_plugin({name!r}): this run does not use DeepSpeed, so there is no plugin")

    def select_deepspeed_plugin(self, name: str | None = None) -> NoReturn:
        """Raises ``InvalidArgument``, because there is no plugin that could be selected."""
        raise InvalidArgument(
            f"select_deepspeed_plugin({name!r}): this run does not use DeepSpeed, so there is no plugin"
        )

    @property
    def torch_tp_plugin(self) -> None:
        """Always ``None``: tensor parallelism is refused."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """Always false: sharding parameters is refused."""
        return False
