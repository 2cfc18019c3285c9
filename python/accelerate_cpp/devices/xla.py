"""TPUs, and whatever else torch_xla computes on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accelerate_cpp.config import env_table
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.tree import leaves_of, recursively_apply
from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

_UNSIGNED = (1 << 64) - 1


def xla_module(name: str) -> Any:
    """A module of torch_xla, such as ``"core.xla_model"``; ``""`` is torch_xla itself. Imported when it is needed."""
    return importlib.import_module(f"torch_xla.{name}" if name else "torch_xla")


def batches_ahead(
    batches: Iterator[Any], device: torch.device, options: Mapping[str, Any]
) -> Generator[Any, None, None]:
    """``batches`` with their tensors on ``device``, read and sent ahead by threads of torch_xla's ``ParallelLoader``.

    Each batch that is taken starts what has been recorded before. To close the iterator ends the threads.

    Args:
        options: of ``ParallelLoader``.

    Raises:
        Exception: what reading raised, once the batches before it have been taken.
    """
    failed: list[BaseException] = []

    def read() -> Iterator[Any]:
        """The threads would end a pass early at an error, and the loop would not hear of it."""
        try:
            yield from batches
        except BaseException as error:
            failed.append(error)

    loader = xla_module("distributed.parallel_loader").ParallelLoader(read(), [device], **options)
    try:
        yield from loader.per_device_loader(device)
    finally:
        loader.close()
    if failed:
        raise failed[0]


class XlaDevice(Device):
    """A device of torch_xla. Operations are recorded, and computed when :meth:`sync` is called or a value is asked for.

    torch_xla knows the ranks of its processes, and which of its devices a process has: one, or with SPMD all, which
    then look like one. Tensors have no addresses, random numbers one seed.
    """

    # ------------------------------------------------------------------------------------------------ availability

    def module(self) -> Any | None:
        if not env_table.USE_TORCH_XLA.get():
            return None
        super().module()  # imports torch_xla, or warns that it cannot be imported; there is no torch.xla
        return sys.modules.get("torch_xla.runtime")

    def is_available(self) -> bool:
        return self.module() is not None

    def count(self) -> int:
        """Those of this process; 1 as long as it has used none: to count them would be a use, which forbids forks."""
        if not self.is_available():
            return 0
        return int(xla_module("runtime").addressable_device_count()) if self.is_initialized() else 1

    def is_initialized(self) -> bool:
        runtime = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
        return runtime is not None and bool(runtime._xla_runtime_is_initialized())

    # --------------------------------------------------------------------------------------------------- which one

    def current(self) -> int:
        return int(self._device().index or 0)

    def set_current(self, index: int) -> None:
        """Nothing: a process has one device."""

    def device(self, name: str) -> torch.device:
        """The device of this process. A number is only accepted if it is that one's.

        Raises:
            InvalidArgument: another number, or several processes of torch_xla are threads of this one.
        """
        runtime = xla_module("runtime")
        if runtime.world_size() > 1 and runtime.addressable_device_count() > 1:
            raise InvalidArgument(
                f"torch_xla runs {runtime.addressable_device_count()} of its {runtime.world_size()} processes as "
                "threads of this one (as on TPU v2 and v3, or with CPU_NUM_DEVICES), and a session belongs to a "
                "process: use devices of which each gets a process, or SPMD (torch_xla.runtime.use_spmd()), with "
                "which one process computes on all devices"
            )
        found, asked = self._device(), torch.device(name)
        if asked.index is not None and asked.index != found.index:
            raise InvalidArgument(
                f"{name}: this process of torch_xla has {found}, and no other device; leave out the number"
            )
        return found

    def name_of(self, index: int) -> str:
        return str(xla_module("core.xla_model").xla_device_hw(self._device()))

    def _device(self) -> torch.device:
        library = xla_module("")
        found = library.device() if hasattr(library, "device") else xla_module("core.xla_model").xla_device()
        return torch.device(found)

    # --------------------------------------------------------------------------------------------------- processes

    def num_processes(self) -> int:
        """The processes that torch_xla has started, on all hosts."""
        return int(xla_module("runtime").world_size())

    def place_on_host(self) -> tuple[int, int]:
        """The rank of this process among those of its host, and their number."""
        runtime = xla_module("runtime")
        return int(runtime.local_ordinal()), int(runtime.local_device_count())

    def before_joining(self) -> None:
        """Lets torch know the address ``xla://``, at which processes find each other."""
        xla_module("distributed.xla_backend")

    # ------------------------------------------------------------------------------------------------------ memory

    def free_bytes(self, index: int) -> int:
        limit, used = self._memory()
        return limit - used

    def allocated_bytes(self, index: int | None = None) -> int:
        return self._memory()[1]

    def _memory(self) -> tuple[int, int]:
        """Bytes there are, and bytes in use; 0 where the runtime does not say it, as on a CPU."""
        try:
            found = xla_module("core.xla_model").get_memory_info(self._device())
        except RuntimeError:  # the runtime has no statistics
            return 0, 0
        if "bytes_limit" in found:
            return int(found["bytes_limit"]), int(found["bytes_used"])
        return int(found["kb_total"]) << 10, int(found["kb_total"] - found["kb_free"]) << 10

    def empty_cache(self) -> None:
        """Nothing: the runtime keeps no memory for later."""

    def lacks(self, precision: str, device: torch.device) -> str | None:
        if precision == "fp8":
            return f"{self.title} ({device}) does not support fp8"
        return super().lacks(precision, device)

    def sync(self) -> None:
        """Compiles and starts what has been recorded since the last call, without waiting for results."""
        library = xla_module("")
        if hasattr(library, "sync"):
            library.sync()
        else:  # before 2.6
            xla_module("core.xla_model").mark_step()

    def synchronize(self) -> None:
        self.sync()
        xla_module("core.xla_model").wait_device_ops()

    # ---------------------------------------------------------------------------------------------- random numbers

    @property
    def random_state_key(self) -> str:
        return "xm_seed"

    def seed(self, seed: int) -> None:
        xla_module("core.xla_model").set_rng_state(seed)

    def random_state(self) -> Tensor:
        """The seed, a whole number of 64 bits: int64, 0-dim."""
        return _as_tensor(int(xla_module("core.xla_model").get_rng_state()))

    def set_random_state(self, state: Tensor) -> None:
        xla_module("core.xla_model").set_rng_state(int(state) & _UNSIGNED)

    def random_states(self) -> list[Tensor]:
        return [self.random_state()]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        self.set_random_state(states[0])

    def to_checkpoint(self, states: Sequence[Tensor]) -> int:
        return int(states[0]) & _UNSIGNED

    def from_checkpoint(self, saved: Any) -> list[Tensor]:
        return [_as_tensor(int(saved))]

    # -------------------------------------------------------------------------------------------------- collectives

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on a device of this kind."""
        return tensor.device.type == self._device().type

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``tensor``, of at least one dimension and the same shape on all processes, of all of them along the first."""
        self.sync()  # all processes have to compile the same
        gathered: Tensor = xla_module("core.xla_model").all_gather(tensor.detach().contiguous())
        self.sync()
        return gathered

    def all_reduce_(self, tensor: Tensor, reduction: str) -> None:
        """Overwrites ``tensor`` with the ``"sum"``, ``"max"`` or ``"min"`` over all processes."""
        self.sync()
        xla_module("core.xla_model").all_reduce(reduction, [tensor])
        self.sync()

    def broadcast_(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrites ``tensors`` with those of process ``source``."""
        self.sync()
        model, runtime = xla_module("core.xla_model"), xla_module("runtime")
        given = list(tensors)
        with torch.no_grad():
            # What decides is data of the device, as all processes have to compile the same. A product would let NaN
            # through.
            mine = torch.full((1,), runtime.global_ordinal() == source, dtype=torch.bool).to(self._device())
            wide = [one.to(torch.uint8) if one.dtype is torch.bool else one for one in given]
            chosen = [torch.where(mine, one, torch.zeros_like(one)) for one in wide]
            model.all_reduce(model.REDUCE_SUM, chosen)
            for one, value in zip(given, chosen, strict=True):
                one.copy_(value)
        self.sync()

    def average_(self, tensors: list[Tensor]) -> None:
        """Overwrites ``tensors`` with the means over all processes, in the graph that is being recorded."""
        model = xla_module("core.xla_model")
        model.all_reduce(model.REDUCE_SUM, tensors, scale=1.0 / self.num_processes())

    # --------------------------------------------------------------------------------------------------- checkpoints

    def to_host(self, state: Any) -> Any:
        """Nested ``state`` with copies on the CPU in place of tensors of the device, which are fetched together."""
        found = {id(leaf): leaf for leaf in leaves_of(state) if self._is_here(leaf)}
        if not found:
            return state
        copies = xla_module("core.xla_model")._maybe_convert_to_cpu([leaf.detach() for leaf in found.values()])
        on_host = dict(zip(found, copies, strict=True))
        return recursively_apply(lambda leaf: on_host[id(leaf)], state, test_type=self._is_here)

    def _is_here(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and self.has(leaf)


def _as_tensor(seed: int) -> Tensor:
    bits = seed & _UNSIGNED
    return torch.tensor(bits - (1 << 64) if bits >> 63 else bits, dtype=torch.int64)
