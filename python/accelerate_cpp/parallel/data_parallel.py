"""Data parallelism: every process holds the whole model, and gradients are averaged while they are computed.

Among CPU processes of one host the averaging is ours (:class:`DataParallel`, over shared memory). Everywhere else
torch's own ``DistributedDataParallel`` does it, over the backend of the process group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp._native import C10dBackend, Communicator, GradientReducer
from accelerate_cpp.errors import InvalidArgument, MismatchedCollective, PeerLost, Timeout
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy

_MEBIBYTE = 1 << 20
_FIRST_BUCKET_BYTES = _MEBIBYTE


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


class DataParallel(torch.nn.Module):
    """A model whose gradients are averaged over all ranks when ``backward()`` returns.

    Passes ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and has the same state-dict names.
    Parameters and buffers of rank 0 are copied to all ranks on construction. Gradients share memory with the exchange
    buffers, as with ``gradient_as_bucket_view=True``: clone what must outlive ``zero_grad()``. Parameters without a
    gradient on any rank keep ``grad=None``; no search for unused parameters is needed.

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
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._communicator = communicator
        self._timeout = timeout
        self._buffers_changed = False
        communicator.broadcast_tensors([*module.parameters(), *self._broadcast_buffers()], 0, timeout)
        self._reducer = GradientReducer(
            communicator,
            _parameters_to_reduce(module),
            first_bucket_cap_bytes=min(_FIRST_BUCKET_BYTES, int(bucket_cap_mb * _MEBIBYTE)),
            bucket_cap_bytes=int(bucket_cap_mb * _MEBIBYTE),
            timeout=timeout,
        )

    @property
    def reducer(self) -> _ReducerView:
        """For callers that switch synchronisation on between forward and backward."""
        return _ReducerView(self._reducer)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return torch.device("cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Whether the backward pass averages is decided here, as in torch's wrapper."""
        if torch.is_grad_enabled():
            self._reducer.synchronizing = self.require_backward_grad_sync
        if self._buffers_changed and self.require_backward_grad_sync:
            self._communicator.broadcast_tensors(self._broadcast_buffers(), 0, self._timeout)
            self._buffers_changed = False
        if self.training and self.broadcast_buffers:
            self._buffers_changed = True
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

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused: gradients are averaged in place, in C++."""
        raise InvalidArgument(
            "communication hooks are not available on shared-memory data parallelism; pass "
            "InitProcessGroupKwargs(backend='gloo') to train with torch's DistributedDataParallel and a hook"
        )

    def abort(self, reason: str) -> None:
        """After a backward pass through this model raised: lets the other ranks raise too instead of waiting."""
        self._reducer.abort(reason)

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
        ddp_kwargs: arguments of torch's wrapper that the user set. Ours takes ``bucket_cap_mb`` and
            ``broadcast_buffers``; the others concern memory sharing and unused parameters, which it always handles.
    """

    def __init__(self, device: torch.device, ddp_kwargs: Mapping[str, Any]) -> None:
        self._device = device
        self._ddp_kwargs = dict(ddp_kwargs)
        self._wrapped: weakref.WeakSet[DataParallel] = weakref.WeakSet()

    def prepare(self, bundle: Bundle) -> Bundle:
        bundle.models = [self._wrap(model) for model in bundle.models]
        return bundle

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = (
            model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)
        )
        return context

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        try:
            loss.backward(**kwargs)
        except (MismatchedCollective, PeerLost, Timeout):
            raise  # the group itself has told the other ranks
        except BaseException as error:
            if loss.requires_grad:  # otherwise torch refused the loss before any rank could wait for another
                for model in self._wrapped:
                    model.abort(f"its backward pass raised {type(error).__name__}: {error}")
            raise

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidArgument(
                f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train. For "
                "evaluation call accelerator.prepare_model(model, evaluation_mode=True)"
            )
        backend = _core_backend() if self._device.type == "cpu" else None
        if backend is None:
            device_ids = None if self._device.type == "cpu" else [self._device.index]
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)
        options = {
            name: self._ddp_kwargs[name] for name in ("bucket_cap_mb", "broadcast_buffers") if name in self._ddp_kwargs
        }
        wrapped = DataParallel(model, backend.communicator, backend.timeout, **options)
        self._wrapped.add(wrapped)
        return wrapped
