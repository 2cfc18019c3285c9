"""The wrapper of a model that every process holds; its gradients are averaged while they are computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp._native import (
    C10dBackend,
    Communicator,
    GradientReducer,
    NcclComm,
    note_registration,
    open_nccl,
)
from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.parallel.compilation import interpreted

_MEBIBYTE = 1 << 20
_FIRST_BUCKET_BYTES = _MEBIBYTE
_BROADCAST_BYTES = 250 * _MEBIBYTE  # at once
_UNTRAINED_COPY = (
    "this is a copy of a prepared model, which belongs to no process group before it is trained; call it in a training "
    "loop on every rank, or prepare its .module"
)


def _note_registration(*_: Any) -> None:
    note_registration()


@cache
def _notice_new_parameters() -> None:
    torch.nn.modules.module.register_module_parameter_registration_hook(_note_registration)
    torch.nn.modules.module.register_module_module_registration_hook(_note_registration)


def _parameters_to_reduce(module: torch.nn.Module, known: Collection[int]) -> list[tuple[str, torch.Tensor, bool]]:
    """The name of each parameter that requires a gradient, the parameter, and whether its gradient is sparse.

    Args:
        known: identities of parameters that have required one.
    """
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    return [
        (name, parameter, id(parameter) in sparse)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad or id(parameter) in known
    ]


def _call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A frame of ours around the call, as ``torch.compile`` passes over those of torch's own modules."""
    return module(*args, **kwargs)


class _ReducerView:
    """The interface that callers of torch's wrapper expect at ``model.reducer``."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def prepare_for_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """The next backward pass averages gradients, whatever was chosen during the forward pass."""
        self._reducer.synchronizing = True


def core_backend() -> C10dBackend | None:
    """The default group's CPU backend if it is ours."""
    group = dist.group.WORLD
    backend = None if group is None else group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, C10dBackend) else None


def device_group_maker(device: torch.device, timeout: timedelta) -> Callable[[], dist.ProcessGroup] | None:
    """A function that creates process groups of all ranks for tensors on ``device``, with the default group's backend.

    Such a group has its own collectives, so that ending it does not affect those of the default group. ``None`` for the
    CPU.
    """
    if device.type == "cpu":
        return None

    def make() -> dist.ProcessGroup:
        world: Any = dist.group.WORLD
        group: dist.ProcessGroup = dist.new_group(backend=world._get_backend(device).name(), timeout=timeout)
        return group

    return make


def connect_nccl(
    group: dist.ProcessGroup, communicator: Communicator, device: torch.device, timeout: timedelta
) -> NcclComm | None:
    """NCCL without torch's process group, for the ranks of ``group``. Collective.

    ``None`` if NCCL cannot be opened on some rank, which warns.
    """
    lacks = torch.zeros(1)
    try:
        open_nccl(device)
    except (InvalidArgument, SystemFailure) as error:
        warnings.warn(
            f"NCCL cannot be asked directly, and torch's process group sums gradients instead: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        lacks.fill_(1)
    communicator.all_reduce(lacks, dist.ReduceOp.MAX, timeout)
    return None if lacks.item() else NcclComm(group, device, timeout)


class Joining(Protocol):
    """What a model has to know of the batches that uneven processes read.

    Attributes:
        weight: of the batch in hand of this rank; ``None`` if all count the same.
        share: to be set: its weight by the mean of those of the ranks that train.
    """

    @property
    def weight(self) -> float | None: ...

    share: float | None


class DataParallel(torch.nn.Module, Joinable):
    """A model whose gradients are averaged over all ranks when ``backward()`` returns.

    Passes ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and has the same state-dict names.
    Parameters and buffers of rank 0 are copied to all ranks on construction. Gradients share memory with the exchange
    buffers, as with ``gradient_as_bucket_view=True``: clone gradients that must outlive ``zero_grad()``. Parameters
    without a gradient on any rank keep ``grad=None``; no search for unused parameters is needed. Parameters that are
    added to the module later, or that require a gradient only later, are included by the next forward pass that trains.

    A backward pass that raises on one rank raises on all of them and leaves no gradients; the next one works.

    Copies and pickles compute independently; the first forward pass that trains one, on all ranks, makes it a prepared
    model of the default process group.

    Args:
        module: a model with at least one parameter that requires a gradient, on the CPU or on one accelerator.
        communicator: of the ranks that train together. Construction is collective.
        make_device_group: makes a process group of the same ranks that sums tensors of the accelerator, and is used
            for nothing else; ``None`` for the CPU. Collective. Called again after a backward pass that raised, which
            ends such a group.
        timeout: of each collective.
        bucket_cap_mb: buckets hold at most this many MiB of gradients; the first one at most 1 MiB.
        device_kernels: whether kernels of ours average and measure gradients on a CUDA device, where they can be
            compiled on all ranks; otherwise torch's operations do. They have been run on one GPU.
        nccl: whether gradients on a CUDA device are summed by NCCL without the process group, which then carries only
            parameters and buffers; if NCCL cannot be opened on all ranks, the group sums them. It has been run
            with one GPU alone.
        broadcast_buffers: whether buffers of rank 0 are copied to all ranks before the forward pass that follows a
            training step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        communicator: Communicator,
        timeout: timedelta,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        make_device_group: Callable[[], dist.ProcessGroup] | None = None,
        device_kernels: bool = False,
        nccl: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._bucket_cap_bytes = int(bucket_cap_mb * _MEBIBYTE)
        self._device_kernels = device_kernels
        self._nccl = nccl
        self._buffers_changed = False
        self._comm_hook: Callable[[dist.GradBucket], Any] | None = None
        self.joining: Joining | None = None  # within join_uneven_inputs
        _notice_new_parameters()
        self._start(communicator, timeout, make_device_group)

    def _start(
        self,
        communicator: Communicator,
        timeout: timedelta,
        make_device_group: Callable[[], dist.ProcessGroup] | None,
    ) -> None:
        self._communicator: Communicator | None = communicator
        self._timeout = timeout
        self._make_device_group = make_device_group
        self._interruptions = communicator.interruptions
        self._device = next(self.module.parameters()).device
        self._make_groups()
        self.take_over_from(0)
        self._reduced: set[int] = set()  # identities of parameters, which the reducer keeps alive
        self._reducer: GradientReducer | None = self._make_reducer()

    def _make_groups(self) -> None:
        self._device_group = None if self._make_device_group is None else self._make_device_group()
        self._nccl_comm: NcclComm | None = None
        if self._nccl and self._device_group is not None:
            self._nccl_comm = connect_nccl(self._device_group, self.communicator, self._device, self._timeout)

    def _make_reducer(self) -> GradientReducer:
        parameters = _parameters_to_reduce(self.module, self._reduced)
        self._reduced = {id(parameter) for _, parameter, _ in parameters}
        reducer = GradientReducer(
            self.communicator,
            parameters,
            [parameter for parameter in self.module.parameters() if id(parameter) not in self._reduced],
            first_bucket_cap_bytes=min(_FIRST_BUCKET_BYTES, self._bucket_cap_bytes),
            bucket_cap_bytes=self._bucket_cap_bytes,
            timeout=self._timeout,
            device_group=self._device_group,
            device_kernels=self._device_kernels,
            nccl=self._nccl_comm,
        )
        if self._comm_hook is not None:
            reducer.register_comm_hook(self._comm_hook, self._group_of_hooks())
        return reducer

    def _group_of_hooks(self) -> dist.ProcessGroup | None:
        return None if self._device_group is None else dist.group.WORLD

    def _replace_ended_group(self) -> None:
        """Where a collective was interrupted since the last look, as by a failed backward pass, the group may have
        ended. All ranks find that at the same place of the program.
        """
        interruptions = self.communicator.interruptions
        if self._make_device_group is None or interruptions == self._interruptions:
            return
        # Ranks that are elsewhere, or gone, show here.
        self.communicator.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, self._timeout)
        self._interruptions = interruptions
        self._make_groups()
        self._reducer = self._make_reducer()

    def _take_in_new_parameters(self) -> None:
        new: list[torch.Tensor] = [
            parameter
            for parameter in self.module.parameters()
            if parameter.requires_grad and id(parameter) not in self._reduced
        ]
        if new:
            self._broadcast(new, 0)
            self._reducer = self._make_reducer()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not hasattr(self.module, name):
                raise
            kind = type(self.module).__name__
            raise AttributeError(
                f"a prepared model has no attribute {name!r}, but the {kind} inside it has: "
                f"accelerator.unwrap_model(model).{name}",
                name=name,
                obj=self,
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        own = (
            *("_communicator", "_make_device_group", "_device_group", "_device", "_reducer", "_reduced", "_comm_hook"),
            *("_join_config", "_interruptions", "_nccl_comm", "joining"),
        )
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self.joining = None
        self._communicator = self._make_device_group = self._device_group = self._reducer = self._comm_hook = None
        self._nccl_comm = None
        self._device = next(self.module.parameters()).device
        self._buffers_changed = False

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that train together.

        Raises:
            InvalidArgument: this is a copy that has not been trained.
        """
        if self._communicator is None:
            raise InvalidArgument(_UNTRAINED_COPY)
        return self._communicator

    @property
    def timeout(self) -> timedelta:
        """The timeout of each collective."""
        return self._timeout

    def _started(self) -> GradientReducer:
        if self._reducer is None:
            raise InvalidArgument(_UNTRAINED_COPY)
        return self._reducer

    def _start_copy(self) -> None:
        backend = core_backend()
        if backend is None:
            raise InvalidArgument(
                "this is a copy of a model that was prepared for processes with backend shm, and there is no such "
                "process group here to train it in; prepare its .module, or call it under torch.no_grad()"
            )
        device = next(self.module.parameters()).device
        self._start(backend.communicator, backend.timeout, device_group_maker(device, backend.timeout))

    @property
    def reducer(self) -> _ReducerView:
        """For callers that enable synchronisation between forward and backward."""
        return _ReducerView(self._started())

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._device

    @interpreted(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Whether the backward pass averages is decided here, as in torch's wrapper."""
        self._start_pass()
        return _call(self.module, args, kwargs)

    @interpreted(recursive=True)  # what is decided here must not tell one compiled graph from another
    def _start_pass(self) -> None:
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._reducer is not None and (torch.is_grad_enabled() or self._buffers_changed):
            self._replace_ended_group()
        if torch.is_grad_enabled():
            if self._reducer is None:
                self._start_copy()
            if self._started().may_lack_parameters():
                self._take_in_new_parameters()
            self._started().synchronizing = self.require_backward_grad_sync
        if self._join_config.enable and torch.is_grad_enabled():
            self._agree_with_those_without_batches(averages)
        elif self._buffers_changed:
            self.broadcast_buffers_from(0)
        self._buffers_changed = self.broadcast_buffers and self.training and averages

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside this block keep the gradients of their backward passes local."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Callable[[Any, dist.GradBucket], Any]) -> None:
        """Makes ``hook(state, bucket)`` average the gradients, as in torch's wrapper; call it before the first backward
        pass.

        Raises:
            InvalidArgument: there is already a hook.
        """
        function = partial(hook, state)
        self._started().register_comm_hook(function, self._group_of_hooks())
        self._comm_hook = function

    def set_weight(self, weight: float | None) -> None:
        """Sets the weight of this rank's gradients in the next backward pass that averages: sums over the ranks are
        then divided by the sum of the weights. Either all ranks set one or none does.
        """
        if self._reducer is not None:
            self._reducer.set_weight(weight)

    def expect_backward(self) -> None:
        """The caller says how the next backward pass ends: by ``backward_ended()`` or ``backward_failed()``."""
        if self._reducer is not None:
            self._reducer.expect_backward()

    def backward_ended(self) -> None:
        """Returns when gradients are averages."""
        if self._reducer is not None:
            self._reducer.backward_ended()

    def backward_failed(self, reason: str) -> None:
        """Makes the other ranks raise, too, instead of waiting, and clears the gradients, as the others do."""
        if self._reducer is not None:
            self._reducer.backward_failed(reason)

    # The interface of torch's Join, and the part of ranks without batches.

    @property
    def join_device(self) -> torch.device:
        """The device of the numbers with which ranks exchange who has batches."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The process group in which ranks exchange who has batches."""
        return dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``; averages are over the ranks that have batches."""
        return UnevenInputs(self)

    def _agree_with_those_without_batches(self, averages: bool) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        weight = 1.0 if self.joining is None else self.joining.weight
        found = agree(self, True, averages, self._buffers_changed, 1.0 if weight is None else weight)
        if self.joining is not None:
            self.joining.share = found.share
        if found.broadcasts:
            self.broadcast_buffers_from(found.first)
        if averages:
            self.set_weight(1.0)

    def take_part_without_gradients(self) -> None:
        """Takes part in a backward pass of the other ranks. Collective."""
        self._started().take_part_without_gradients()

    def broadcast_buffers_from(self, source: int) -> None:
        """Overwrites the buffers with those of rank ``source``. Collective."""
        self._broadcast(self._broadcast_buffers(), source)

    def take_over_from(self, source: int) -> None:
        """Overwrites parameters and buffers with those of rank ``source``. Collective."""
        self._broadcast([*self.module.parameters(), *self._broadcast_buffers()], source)

    def _broadcast(self, tensors: list[torch.Tensor], source: int) -> None:
        group = self._device_group
        if group is not None:
            # As data, whose changes autograd does not count, like those of the communicator.
            on_device = [tensor.data for tensor in tensors if tensor.device == self._device]
            if on_device:
                dist._broadcast_coalesced(group, on_device, _BROADCAST_BYTES, source)
            tensors = [tensor for tensor in tensors if tensor.device != self._device]
        self.communicator.broadcast_tensors(tensors, source, self._timeout)

    def _broadcast_buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.numel() > 0] if self.broadcast_buffers else []


# A virtual subclass: torch's metaclass is ABCMeta, and subclassing for real would bring its reducer along.
DistributedDataParallel.register(DataParallel)


@dataclass(frozen=True)
class Agreement:
    """What a step of all ranks does, of which some may have run out of batches.

    Attributes:
        averages, broadcasts: whether it averages gradients, and whether it broadcasts buffers.
        first: the first rank that trains.
        share: the weight of this rank's batch by the mean of those of the ranks that train.
    """

    averages: bool
    broadcasts: bool
    first: int
    share: float


def agree(
    model: DataParallel, trains: bool, averages: bool = False, broadcasts: bool = False, weight: float = 1.0
) -> Agreement:
    """Agrees on a step with the other ranks. Collective."""
    communicator = model.communicator
    numbers = torch.zeros(3 + communicator.size, dtype=torch.float64)
    numbers[0], numbers[1], numbers[2] = averages, broadcasts, weight if trains else 0.0
    numbers[3 + communicator.rank] = trains
    communicator.all_reduce(numbers, dist.ReduceOp.SUM, model.timeout)
    some_average, some_broadcast, weights, *training = numbers.tolist()
    share = weight * sum(training) / weights if weights else 1.0
    return Agreement(some_average > 0, some_broadcast > 0, training.index(1.0), share)


class UnevenInputs(JoinHook):
    """The part of one model on a rank that has run out of batches before the others (torch's ``Join``).

    In every step all ranks first agree whether gradients are averaged, whether buffers are broadcast, on the first rank
    that still trains, whose buffers are used, and on the share of each batch. A rank without batches takes part in
    both, without contributing: the sums over the ranks are divided by the number of those that have batches.
    """

    def __init__(self, model: DataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Mirrors one training step of the ranks that have batches."""
        found = agree(self._model, trains=False)
        if found.broadcasts:
            self._model.broadcast_buffers_from(found.first)
        if found.averages:
            self._model.take_part_without_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes over the model of a rank that trained to the end."""
        self._model.take_over_from(agree(self._model, trains=is_last_joiner).first)
