"""Data parallelism: every process holds the whole model, and gradients are averaged while they are computed.

Among CPU processes of one host the averaging is ours (:class:`DataParallel`, over shared memory). Everywhere else
torch's own ``DistributedDataParallel`` does it, over the backend of the process group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp._native import C10dBackend, Communicator, GradientReducer
from accelerate_cpp.errors import InvalidArgument, MismatchedCollective, PeerLost, Timeout
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.comm_hooks import hook_for
from accelerate_cpp.parallel.joining import UnevenInputs, agree
from accelerate_cpp.parallel.single import SingleStrategy, multiply_gradients

_MEBIBYTE = 1 << 20
_FIRST_BUCKET_BYTES = _MEBIBYTE
_HOOK_OPTIONS: dict[str, Any] = {"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}}
_UNTRAINED_COPY = (
    "this is a copy of a prepared model, which belongs to no process group before it is trained; call it in a training "
    "loop on every rank, or prepare its .module"
)


def _parameters_to_reduce(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    """The name of each parameter that requires a gradient, the parameter, and whether its gradient is sparse."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    return [
        (name, parameter, id(parameter) in sparse)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


class _ReducerView:
    """What callers of torch's wrapper expect at ``model.reducer``."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def prepare_for_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """The next backward pass averages gradients, whatever was chosen during the forward pass."""
        self._reducer.synchronizing = True


class DataParallel(torch.nn.Module, Joinable):
    """A model whose gradients are averaged over all ranks when ``backward()`` returns.

    Passes ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and has the same state-dict names.
    Parameters and buffers of rank 0 are copied to all ranks on construction. Gradients share memory with the exchange
    buffers, as with ``gradient_as_bucket_view=True``: clone what must outlive ``zero_grad()``. Parameters without a
    gradient on any rank keep ``grad=None``; no search for unused parameters is needed.

    Copies and pickles compute by themselves; the first forward pass that trains one, on all ranks, makes it a prepared
    model of the default process group.

    Args:
        module: a model on the CPU with at least one parameter that requires a gradient.
        communicator: of the ranks that train together. Construction is collective.
        timeout: of each collective.
        bucket_cap_mb: buckets hold at most this many MiB of gradients; the first one at most 1 MiB.
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
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._bucket_cap_bytes = int(bucket_cap_mb * _MEBIBYTE)
        self._buffers_changed = False
        self._start(communicator, timeout)

    def _start(self, communicator: Communicator, timeout: timedelta) -> None:
        self._communicator: Communicator | None = communicator
        self._timeout = timeout
        self.take_over_from(0)
        self._reducer: GradientReducer | None = GradientReducer(
            communicator,
            _parameters_to_reduce(self.module),
            first_bucket_cap_bytes=min(_FIRST_BUCKET_BYTES, self._bucket_cap_bytes),
            bucket_cap_bytes=self._bucket_cap_bytes,
            timeout=timeout,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_communicator", "_reducer", "_join_config")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self._communicator = self._reducer = None
        self._buffers_changed = False

    @property
    def communicator(self) -> Communicator:
        """Of the ranks that train together.

        Raises:
            InvalidArgument: this is a copy that has not been trained.
        """
        if self._communicator is None:
            raise InvalidArgument(_UNTRAINED_COPY)
        return self._communicator

    @property
    def timeout(self) -> timedelta:
        """Of each collective."""
        return self._timeout

    def _started(self) -> GradientReducer:
        if self._reducer is None:
            raise InvalidArgument(_UNTRAINED_COPY)
        return self._reducer

    def _start_copy(self) -> None:
        backend = _core_backend()
        if backend is None:
            raise InvalidArgument(
                "this is a copy of a model that was prepared for processes with backend shm, and there is no such "
                "process group here to train it in; prepare its .module, or call it under torch.no_grad()"
            )
        self._start(backend.communicator, backend.timeout)

    @property
    def reducer(self) -> _ReducerView:
        """For callers that switch synchronisation on between forward and backward."""
        return _ReducerView(self._started())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return torch.device("cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Whether the backward pass averages is decided here, as in torch's wrapper."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            if self._reducer is None:
                self._start_copy()
            self._started().synchronizing = self.require_backward_grad_sync
        if self._join_config.enable and torch.is_grad_enabled():
            self._agree_with_those_without_batches(averages)
        elif self._buffers_changed:
            self.broadcast_buffers_from(0)
        self._buffers_changed = self.broadcast_buffers and self.training and averages
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes within it leave the gradients of their backward passes local."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Callable[[Any, dist.GradBucket], Any]) -> None:
        """Lets ``hook(state, bucket)`` average the gradients, as in torch's wrapper; before the first backward pass.

        Raises:
            InvalidArgument: there is a hook already.
        """
        self._started().register_comm_hook(partial(hook, state))

    def set_weight(self, weight: float | None) -> None:
        """What the gradients of this rank weigh in the next backward pass that averages: sums over the ranks are then
        divided by the sum of the weights. Either all ranks set one or none does.
        """
        if self._reducer is not None:
            self._reducer.set_weight(weight)

    def abort(self, reason: str) -> None:
        """After a backward pass through this model raised: lets the other ranks raise too instead of waiting."""
        if self._reducer is not None:
            self._reducer.abort(reason)

    # What torch's Join asks for, and what ranks without batches do.

    @property
    def join_device(self) -> torch.device:
        """Where the numbers lie that ranks exchange about who has batches."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The process group in which ranks tell each other who has batches."""
        return dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``; averages are over the ranks that have batches."""
        return UnevenInputs(self)

    def _agree_with_those_without_batches(self, averages: bool) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        _, broadcasts, source = agree(self, trains=True, averages=averages, broadcasts=self._buffers_changed)
        if broadcasts:
            self.broadcast_buffers_from(source)
        if averages:
            self.set_weight(1.0)

    def take_part_without_gradients(self) -> None:
        """Takes part in a backward pass of the other ranks. Collective."""
        self._started().take_part_without_gradients()

    def broadcast_buffers_from(self, source: int) -> None:
        """Overwrites the buffers by those of rank ``source``. Collective."""
        self.communicator.broadcast_tensors(self._broadcast_buffers(), source, self._timeout)

    def take_over_from(self, source: int) -> None:
        """Overwrites parameters and buffers by those of rank ``source``. Collective."""
        tensors = [*self.module.parameters(), *self._broadcast_buffers()]
        self.communicator.broadcast_tensors(tensors, source, self._timeout)

    def _broadcast_buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.numel() > 0] if self.broadcast_buffers else []


# A virtual subclass: torch's metaclass is ABCMeta, and subclassing for real would bring its reducer along.
DistributedDataParallel.register(DataParallel)


def _core_backend() -> C10dBackend | None:
    """The default group's CPU backend if it is ours."""
    group = dist.group.WORLD
    backend = None if group is None else group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, C10dBackend) else None


class DataParallelStrategy(SingleStrategy):
    """Every process holds the whole model; gradients are averaged.

    Args:
        device: of this process.
        ddp_kwargs: arguments of torch's wrapper that the user set, and of the communication hook. Ours takes
            ``bucket_cap_mb``, ``broadcast_buffers`` and the hook; the others concern memory sharing and unused
            parameters, which it always handles.
    """

    def __init__(self, device: torch.device, ddp_kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._device = device
        self._ddp_kwargs = {name: value for name, value in ddp_kwargs.items() if name not in _HOOK_OPTIONS}
        self._hook_options = tuple(ddp_kwargs.get(name, default) for name, default in _HOOK_OPTIONS.items())
        self._wrapped: weakref.WeakSet[DataParallel] = weakref.WeakSet()

    def prepare(self, bundle: Bundle) -> Bundle:
        bundle.models = [self._wrap(model) for model in bundle.models]
        return bundle

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = (
            model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)
        )
        return context

    def backward(self, loss: torch.Tensor, weight: float | None = None, **kwargs: Any) -> None:
        # torch's wrapper knows no weights: it divides by the number of ranks.
        factor = None if weight is None or not self._models else dist.get_world_size() * self._share(weight)
        for model in self._wrapped if weight is not None else ():
            model.set_weight(weight)
        try:
            loss.backward(**kwargs)
        except (MismatchedCollective, PeerLost, Timeout):
            raise  # the group itself has told the other ranks
        except BaseException as error:
            if loss.requires_grad:  # otherwise torch refused the loss before any rank could wait for another
                for model in self._wrapped:
                    model.abort(f"its backward pass raised {type(error).__name__}: {error}")
            raise
        for model in self._wrapped if weight is not None else ():
            model.set_weight(None)  # of models that the loss does not depend on
        if factor is not None:
            multiply_gradients(self._models, factor)

    @contextmanager
    def join(self, models: Iterable[Any]) -> Iterator[bool]:
        models = list(models)
        with Join(models, divide_by_initial_world_size=False):
            yield all(isinstance(model, DataParallel) for model in models)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def _share(self, weight: float) -> float:
        """One divided by the sum of the weights of all ranks. Collective."""
        total = torch.tensor(weight, device=self._device)
        dist.all_reduce(total)
        return 1.0 / float(total) if float(total) > 0.0 else 0.0

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidArgument(
                f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train. For "
                "evaluation call accelerator.prepare_model(model, evaluation_mode=True)"
            )
        backend = _core_backend() if self._device.type == "cpu" else None
        wrapped: DataParallel | DistributedDataParallel
        if backend is None:
            device_ids = None if self._device.type == "cpu" else [self._device.index]
            wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)
            self._models.add(wrapped)
        else:
            known = ("bucket_cap_mb", "broadcast_buffers")
            options = {name: self._ddp_kwargs[name] for name in known if name in self._ddp_kwargs}
            wrapped = DataParallel(model, backend.communicator, backend.timeout, **options)
            self._wrapped.add(wrapped)
        hook = hook_for(*self._hook_options)
        if hook is not None:
            wrapped.register_comm_hook(*hook)
        return wrapped
