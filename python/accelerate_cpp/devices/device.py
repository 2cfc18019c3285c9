"""One kind of device: all that the package asks of it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accelerate_cpp.devices.transfer import CopyStream
from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of accelerator that torch calls ``type``. It answers through ``torch.<type>``, as a module of a device has
    to look for ``torch.accelerator``; a kind that answers otherwise is a subclass.

    A package that brings a device names an object of this class in the entry point group ``accelerate_cpp.devices``
    (see ``docs/devices.md``).

    Args:
        type: torch's name for it, such as ``"cuda"``.
        title: what messages call it, such as ``"NVIDIA or AMD GPU"``.
        distributed_type: the name of a ``DistributedType``, for several processes.
        collectives: the backend of ``torch.distributed`` for its tensors; ``None`` for the one that is registered for
            the type with torch.
        package: what has to be imported before torch knows the type; ``None`` if torch does by itself.
        one_process: several processes cannot train on it.
        index_by_rank: the process with local rank n takes device n; otherwise it takes the current one.
        numbered: device maps name its devices by numbers; otherwise by the type.
        has_streams: whether copies can run beside computation.
        pins_memory: whether copies from pinned memory of the host are faster.
        shares_memory_with_host: its memory is the machine's.
        has_float64: whether it computes in float64.
        half_precisions: of ``"fp16"`` and ``"bf16"`` those that it can compute in, as far as the kind decides.
        has_tf32: whether ``torch.backends.<type>.matmul.allow_tf32`` exists.
        emulates_fp8: products in fp8 are computed in float32.
        init_method: the address by which torch finds the process group, where the package of the kind starts the
            processes and knows their ranks; ``None`` where the environment describes them.
        counts_alone: a run of one process is of ``distributed_type``, too.
    """

    type: str
    title: str
    distributed_type: str = "MULTI_GPU"
    collectives: str | None = None
    package: str | None = None
    one_process: bool = False
    index_by_rank: bool = True
    numbered: bool = True
    has_streams: bool = True
    pins_memory: bool = True
    shares_memory_with_host: bool = False
    has_float64: bool = True
    half_precisions: frozenset[str] = frozenset({"fp16", "bf16"})
    has_tf32: bool = False
    emulates_fp8: bool = False
    init_method: str | None = None
    counts_alone: bool = False

    # ------------------------------------------------------------------------------------------------ availability

    def module(self) -> Any | None:
        """``torch.<type>``, for which :attr:`package` is imported if it is installed; ``None`` without it."""
        package = self.package
        if package is not None and package not in sys.modules and not _imports(package, self.type, tuple(sys.path)):
            return None
        return getattr(torch, self.type, None)

    def is_available(self) -> bool:
        """Whether torch can use such a device here."""
        module = self.module()
        return module is not None and bool(module.is_available())

    def count(self) -> int:
        """The number of devices that this process sees; 0 without one, and where the driver does not answer."""
        if not self.is_available():
            return 0
        try:
            return int(self._module.device_count())
        except RuntimeError as error:
            _logger.debug("torch.%s cannot count its devices: %s", self.type, error)
            return 0

    def is_initialized(self) -> bool:
        """Whether this process has started to use one. Its forks then cannot, on most kinds. Imports nothing."""
        module = getattr(torch, self.type, None)
        return bool(getattr(module, "is_initialized", bool)())

    # --------------------------------------------------------------------------------------------------- which one

    def prepare_use(self) -> None:
        """Called before the first tensor is on the device."""

    def current(self) -> int:
        """The index of the current device of this thread."""
        return int(self._module.current_device())

    def set_current(self, index: int) -> None:
        """Makes device ``index`` the current one of this thread."""
        self._module.set_device(index)

    def device(self, name: str) -> torch.device:
        """``name``, such as ``"cuda:1"`` or ``"cuda"``, as the device of this process; it becomes the current one."""
        self.prepare_use()
        device = torch.device(name)
        if ":" in name:
            self.set_current(device.index)
        elif self.numbered and not self.index_by_rank:
            return torch.device(self.type, self.current())
        return device

    def name_of(self, index: int) -> str:
        """The name of the product."""
        return str(getattr(self._module, "get_device_name", lambda _: f"{self.type}:{index}")(index))

    # ------------------------------------------------------------------------------------------------------ memory

    def free_bytes(self, index: int) -> int:
        """Bytes of device ``index`` that are free now."""
        return int(self._module.mem_get_info(index)[0])

    def allocated_bytes(self, index: int | None = None) -> int:
        """Bytes in tensors of this process on device ``index``, or the current one; 0 where that is not known."""
        return int(getattr(self._module, "memory_allocated", lambda _: 0)(index))

    def empty_cache(self) -> None:
        """Returns memory that torch keeps for later to the device."""
        getattr(self._module, "empty_cache", lambda: None)()

    def synchronize(self) -> None:
        """Waits until everything that has been queued on the current device is done."""
        self._module.synchronize()

    def sync(self) -> None:
        """Starts what has been recorded for the device, where operations are recorded at first."""

    def to_host(self, state: Any) -> Any:
        """Nested ``state`` as it can be written into files: as it is, unless tensors of the kind have no addresses."""
        return state

    # ---------------------------------------------------------------------------------------------- random numbers

    @property
    def random_state_key(self) -> str:
        """The name of its states in checkpoints."""
        return f"torch_{self.type}_manual_seed"

    def seed(self, seed: int) -> None:
        """Seeds the generators of all devices of the kind."""
        self._module.manual_seed_all(seed)

    def random_state(self) -> Tensor:
        """The state of the generator of the current device: uint8, on the CPU."""
        state: Tensor = self._module.get_rng_state()
        return state

    def set_random_state(self, state: Tensor) -> None:
        """Continues the generator of the current device from ``state``."""
        self._module.set_rng_state(state)

    def random_states(self) -> list[Tensor]:
        """The states of the generators of all devices that this process sees, each uint8, on the CPU."""
        return list(self._module.get_rng_state_all())

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        """Continues from what :meth:`random_states` returned; fewer states are those of the first devices."""
        self._module.set_rng_state_all(list(states))

    def to_checkpoint(self, states: Sequence[Tensor]) -> Any:
        """What :meth:`random_states` returned, as checkpoints hold it."""
        return states

    def from_checkpoint(self, saved: Any) -> Any:
        """The inverse of :meth:`to_checkpoint`."""
        return saved

    # --------------------------------------------------------------------------------------------------- precision

    def lacks(self, precision: str, device: torch.device) -> str | None:
        """Why ``device`` cannot compute in ``"fp16"``, ``"bf16"`` or ``"fp8"``, as a clause; ``None`` if it can."""
        if precision not in self.half_precisions | {"fp8"}:
            return f"{self.title} ({device}) does not support {precision}"
        return None

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """The scaler of losses for fp16, with ``options`` of ``torch.amp.GradScaler``."""
        return torch.amp.GradScaler(self.type, **options)

    def allow_tf32(self) -> None:
        """Allows TF32 for fp32 matrix products, where the kind has it."""
        if self.has_tf32:
            getattr(torch.backends, self.type).matmul.allow_tf32 = True

    # --------------------------------------------------------------------------------------- transfers, processes

    def require_computable(self, batch: Any) -> None:
        """Checks that ``batch``, a tree, has no tensors that the kind cannot hold.

        Raises:
            InvalidArgument: there is one of float64, and the kind has none.
        """
        if self.has_float64:
            return
        for leaf in leaves_of(batch):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float64, torch.complex128):
                raise InvalidArgument(
                    f"a batch has a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}, which {self.title} "
                    f"({self.type}) does not have; convert it in the dataset or in collate_fn, for example by "
                    ".float() (arrays of NumPy are float64 by default)"
                )

    def copy_stream(self, device: torch.device) -> CopyStream | None:
        """What copies batches from pinned memory to ``device`` beside computation; ``None`` where nothing can."""
        return CopyStream(device, self._module) if self.has_streams and self.pins_memory else None

    def backend(self) -> str:
        """The backend of ``torch.distributed`` for its tensors.

        Raises:
            InvalidArgument: torch has none for the type.
        """
        import torch.distributed as dist

        if self.collectives is not None:
            return self.collectives
        try:
            return str(dist.get_default_backend_for_device(self.type))
        except ValueError as error:
            raise InvalidArgument(
                f"several processes on {self.title} ({self.type}): torch has no backend of torch.distributed for it. "
                "Import the package that registers one, pass InitProcessGroupKwargs(backend=…), or start one process"
            ) from error

    def num_processes(self) -> int:
        """Where there is an :attr:`init_method`, the processes that the package of the kind has started."""
        return 1

    def place_on_host(self) -> tuple[int, int]:
        """Where there is an :attr:`init_method`, the rank of this process on its host, and the number of those."""
        return 0, 1

    def before_joining(self) -> None:
        """Called before torch is given :attr:`init_method`."""

    def numa_nodes(self, environ: Mapping[str, str]) -> Sequence[int | None]:
        """The NUMA node of each device that ``environ`` lets a worker see, in order; empty if nothing is known."""
        return ()

    @property
    def _module(self) -> Any:
        module = getattr(torch, self.type, None)
        if module is None:
            raise InvalidArgument(f"torch knows no device of type {self.type!r}; import the package that brings it")
        return module


@functools.cache
def _imports(package: str, device_type: str, path: tuple[str, ...]) -> bool:
    """Whether ``package`` can be imported from ``path``. It is tried once: the search is slow, and a failure warns."""
    if not _is_installed(package):
        return False
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:  # installed, but not for this machine, or a library of it is missing
        text = "%s is installed but cannot be imported, so there is no %s: %s"
        _logger.warning(text, package, device_type, error)
        return False
    return True


def _is_installed(package: str) -> bool:
    """Whether ``package`` can be found."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False
