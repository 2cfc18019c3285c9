"""The number of processes for each kind of parallelism, and the mesh that they form."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accelerate_cpp.config import plugin_variables
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelismConfig"]

_DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
# Outermost first: neighbouring ranks, which communicate fastest, split layers, then sequences.
_ORDER_IN_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass
class ParallelismConfig:
    """How many processes copy the model, shard its parameters, split its layers, split sequences, and have stages.

    Sizes may be changed until an ``Accelerator`` is created. Sizes and backends that are ``None`` are read from
    ``PARALLELISM_CONFIG_*``.

    Attributes:
        dp_replicate_size: copies of the model, or of its shards.
        dp_shard_size: processes over which the parameters of each copy are sharded.
        tp_size: processes over which layers are split (tensor parallelism).
        cp_size: processes over which sequences are split for torch's attention (context parallelism).
        cp_backend: ``"torch"``.
        sp_size: processes over which sequences are split for DeepSpeed's attention (sequence parallelism).
        sp_backend: ``"deepspeed"``.
        tp_handler, cp_handler, sp_handler: options of these kinds; by default the default options if the size is above
            1.
        pp_size: processes over which models are cut into stages (pipeline parallelism). Not in the original.
        pp_handler: a ``PipelineParallelConfig``.

    Raises:
        InvalidArgument: a size is not an integer or below 1, sizes cannot be combined, or an option has the wrong
            class.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineParallelConfig | None = None

    # The mesh, after its first use, and the sizes by dimension; they are not fields, so they are not annotated.
    device_mesh = None  # type: DeviceMesh | None
    _sizes = None  # type: Any

    def __post_init__(self) -> None:
        plugin_variables.fill(self, plugin_variables.PARALLELISM)
        for name in _DIMENSIONS:
            setattr(self, f"{name}_size", _size(f"{name}_size", getattr(self, f"{name}_size")))
        _require_one_of("cp_backend", self.cp_backend, "torch")
        _require_one_of("sp_backend", self.sp_backend, "deepspeed")
        self._require_composable()
        if self.tp_enabled:
            self.tp_handler = self.tp_handler or TorchTensorParallelConfig()
            _require_kind("tp_handler", self.tp_handler, TorchTensorParallelConfig)
        if self.cp_enabled:
            self.cp_handler = self.cp_handler or TorchContextParallelConfig()
            _require_kind("cp_handler", self.cp_handler, TorchContextParallelConfig)
        if self.sp_enabled:
            self.sp_handler = self.sp_handler or DeepSpeedSequenceParallelConfig()
            _require_kind("sp_handler", self.sp_handler, DeepSpeedSequenceParallelConfig)
        if self.pp_enabled:
            self.pp_handler = self.pp_handler or PipelineParallelConfig()
            _require_kind("pp_handler", self.pp_handler, PipelineParallelConfig)
        self._sizes = {name: self._size_of(name) for name in _DIMENSIONS}

    def _set_size(self, parallelism: str, size: int) -> None:
        """Sets the size of the dimension ``parallelism``; only checks that there is such a dimension."""
        if parallelism not in self._sizes:
            raise InvalidArgument(
                f"ParallelismConfig: there is no dimension {parallelism!r}; expected one of {', '.join(self._sizes)}"
            )
        self._sizes[parallelism] = _size(f"{parallelism}_size", size)
        setattr(self, f"{parallelism}_size", self._sizes[parallelism])

    def _get_mesh(self) -> tuple[Any, ...]:
        """The names of the active dimensions and their sizes, outermost first; ``()`` if there is none."""
        names = sorted(self.active_mesh_dims, key=_ORDER_IN_MESH.index)
        return (tuple(names), tuple(map(self._size_of, names))) if names else ()

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Fills in missing sizes, and refuses those that do not fit the number of processes of ``accelerator``.

        Raises:
            InvalidArgument: the product of the sizes is another number of processes.
        """
        if self.total_size == 1:
            if accelerator.multi_device:
                self._set_size("dp_replicate", accelerator.num_processes)
        elif not self.sp_enabled and self.total_size != accelerator.num_processes:
            raise InvalidArgument(
                f"ParallelismConfig total_size ({self.total_size}) does not match num_processes "
                f"({accelerator.num_processes}); make the product of the sizes equal the number of processes"
            )
        self._warn_of_idle_handlers()

    def _warn_of_idle_handlers(self) -> None:
        for name in ("tp", "cp", "sp", "pp"):
            if self._size_of(name) == 1 and getattr(self, f"{name}_handler") is not None:
                warnings.warn(
                    f"ParallelismConfig.{name}_handler is set, but {name}_size is set to 1: it has no effect",
                    stacklevel=3,
                )

    def _require_composable(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise InvalidArgument(
                f"ParallelismConfig: cp_size={self.cp_size} and sp_size={self.sp_size} would both split sequences; "
                "leave one of them at 1"
            )

    def _size_of(self, dimension: str) -> int:
        return int(getattr(self, f"{dimension}_size"))

    def _active(self, dimensions: Iterable[str]) -> list[str]:
        return [name for name in dimensions if self._size_of(name) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one copy."""
        return self._size_of("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self._size_of("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self._size_of("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split for torch's attention."""
        return self._size_of("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split for DeepSpeed's attention."""
        return self._size_of("sp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether models are cut into stages."""
        return self._size_of("pp") > 1

    @property
    def total_size(self) -> int:
        """The number of processes of all dimensions together."""
        return math.prod(self._size_of(name) for name in _DIMENSIONS)

    @property
    def data_parallel_size(self) -> int:
        """The number of different batches per step."""
        return self._size_of("dp_replicate") * self._size_of("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that work on one batch together."""
        return math.prod(self._size_of(name) for name in ("tp", "cp", "sp", "pp"))

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions with more than one process."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def axes(self) -> dict[str, int]:
        """The active dimensions with their sizes."""
        return {name: self._size_of(name) for name in self.active_mesh_dims}

    @property
    def dp_dim_names(self) -> list[str]:
        """The active dimensions along which batches differ."""
        return self._active(("dp_replicate", "dp_shard"))

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active dimensions along which batches are the same."""
        return self._active(("tp", "cp", "sp", "pp"))

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active dimensions over which parameters are sharded."""
        return self._active(("dp_shard", "cp"))

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active dimensions over which losses are averaged."""
        return self._active(("dp_replicate", "dp_shard", "cp"))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh for torch's FSDP: copies, if there are any, and joined shards."""
        return [*self._active(("dp_replicate",)), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """A new mesh of the active dimensions, in which ``"dp"``, ``"dp_shard_cp"`` and ``"dp_cp"`` are joint ones.

        A collective of all processes.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``, for example.

        Returns:
            ``None`` if no dimension is active, and for sequence parallelism, for which DeepSpeed creates its own
            groups.
        """
        found = self._get_mesh()
        if not found or self.sp_enabled:
            return None
        dimensions, shape = found
        from torch.distributed.device_mesh import init_device_mesh  # takes a while to import

        from accelerate_cpp.comm.timeouts import that_of_all

        with that_of_all():
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=dimensions)
            for joint, parts in (
                ("dp", self.dp_dim_names),
                ("dp_shard_cp", self.dp_shard_cp_dim_names),
                ("dp_cp", self.dp_cp_dim_names),
            ):
                if parts:
                    mesh[parts]._flatten(joint)  # type: ignore[index]
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh, which is built at the first call, and again after sizes have changed.

        Args:
            device_type: as for :meth:`build_device_mesh`; may be ``None`` once there is a mesh.

        Raises:
            InvalidArgument: there is no mesh and no ``device_type``, or there is one of another type.
        """
        mesh = self.device_mesh
        kind = device_type if mesh is None else mesh.device_type
        if kind is None:
            raise InvalidArgument("get_device_mesh: there is no mesh yet; pass device_type, 'cuda' for example")
        if device_type not in (None, kind):
            raise InvalidArgument(
                f"get_device_mesh({device_type!r}): there is already a mesh of {kind} devices; leave device_type out, "
                "or create another ParallelismConfig"
            )
        if mesh is None or self._differs_from(mesh):
            self.device_mesh = self.build_device_mesh(kind)
        return self.device_mesh

    def _differs_from(self, mesh: DeviceMesh) -> bool:
        return (tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)) != (self._get_mesh() or ((), ()))

    def to_json(self) -> dict[str, Any]:
        """All fields, including those of the handlers, in a form that ``json`` can write."""
        return asdict(self)


def _size(name: str, found: Any) -> int:
    try:
        size = operator.index(found)
    except TypeError:
        size = 0
    if size < 1:
        raise InvalidArgument(f"ParallelismConfig: {name}={found!r}; expected an integer, 1 or more")
    return size


def _require_one_of(name: str, found: Any, *expected: str) -> None:
    if found not in expected:
        raise InvalidArgument(f"ParallelismConfig: {name}={found!r}; expected {' or '.join(map(repr, expected))}")


def _require_kind(name: str, found: Any, kind: type) -> None:
    if not isinstance(found, kind):
        raise InvalidArgument(f"ParallelismConfig: {name}={found!r}; expected a {kind.__name__}")
