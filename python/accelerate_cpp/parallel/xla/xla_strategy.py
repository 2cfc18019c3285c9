"""Training through torch_xla.

Backward passes are recorded, and gradients averaged before a step or before they are clipped, in the same graph; the
graph is compiled and started once for each step. With SPMD, one process records for all devices, and the compiler adds
what they exchange, from how parameters and batches are shared out (``spmd.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from accelerate_cpp.devices.xla import XlaDevice
from accelerate_cpp.parallel.clipping import clip_grad_norm
from accelerate_cpp.parallel.compilation import inside_compiler, without_compiler
from accelerate_cpp.parallel.single import SingleStrategy, weigh_averages
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import HandOver
from accelerate_cpp.parallel.wrappers import without_wrapper
from accelerate_cpp.parallel.xla import spmd
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin

_HOST = torch.device("cpu")


class XlaStrategy(SingleStrategy):
    """Every process has the whole model, or with SPMD one process a model that all its devices share.

    Args:
        kind: the devices of torch_xla.
        world_size: the number of processes.
        plugin: how models are shared out over the devices, with SPMD; ``None`` where each device has all of them.
    """

    def __init__(self, kind: XlaDevice, world_size: int, plugin: FullyShardedDataParallelPlugin | None = None) -> None:
        super().__init__()
        self._kind = kind
        self._world_size = world_size
        self._plugin = plugin
        self._averaged: set[int] = set()  # by id, parameters whose gradients have been averaged since the last pass

    def _distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        if not _averages_itself(model):
            if self._world_size > 1:
                self._kind.broadcast_([*model.parameters(), *model.buffers()], source=0)
            if self._plugin is not None:
                spmd.share_out(model, self._plugin)
        return super()._distribute(model)

    def input_sharding(self) -> Any:
        """How the rows of batches are shared out over the devices; ``None`` where a device gets whole batches."""
        return spmd.RowsOfBatches(spmd.mesh()) if spmd.is_on() else None

    # Gradients

    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        if self._world_size == 1:
            super().backward(loss, weights, **kwargs)
            return
        loss.backward(**kwargs)
        self._averaged.clear()  # own gradients have been added to what was averaged
        if weights is not None and weights.totals:
            models = self.models()
            self._average(parameter for model in models for parameter in model.parameters())
            weigh_averages(models, weights, _HOST, self._world_size)

    @property
    def gradients_are_averaged(self) -> bool:
        """Whether the next step or clipping does not average gradients, as that has been done."""
        return bool(self._averaged)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        parameters = _parameters_of(optimizer)
        self._average(parameters)
        yield
        self._averaged.difference_update(map(id, parameters))
        self._kind.sync()

    def recomputing(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            result = closure()
            self._average(_parameters_of(optimizer))
            return result

        return averaged

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        tensors = list(parameters)
        for model in self.models():
            own: Any = inside_compiler(model)
            if _averages_itself(own) and hasattr(own, "clip_grad_norm_") and _same(tensors, own.parameters()):
                norm: torch.Tensor = own.clip_grad_norm_(max_norm, norm_type)
                return norm
        self._average(tensors)
        return clip_grad_norm(tensors, max_norm, norm_type, measured)

    def prepare_to_clip(self, parameters: Iterable[torch.Tensor]) -> None:
        self._average(parameters)

    def _average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Averages gradients over the processes, each once after a backward pass. All processes record the same."""
        if self._world_size == 1:
            return
        apart = {id(one) for model in self.models() if _averages_itself(model) for one in model.parameters()}
        fresh = {
            id(one): one.grad
            for one in parameters
            if one.grad is not None and id(one) not in self._averaged and id(one) not in apart
        }
        if fresh:
            self._kind.average_([*fresh.values()])
            self._averaged.update(fresh)

    @property
    def can_join(self) -> bool:
        return False

    def join(self, models: Iterable[Any], hand_over: HandOver | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    # States

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return without_wrapper(without_compiler(model))

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        inner = self.unwrap(model)
        state = inner.state_dict()
        on_host, first_names = self._kind.to_host(dict(state)), dict[int, str]()
        named = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
        for name, tensor in named:  # what is tied stays tied, and is stored once
            first = first_names.setdefault(id(tensor), name)
            if name in on_host and first in on_host:
                on_host[name] = on_host[first]
        for name, tensor in on_host.items():
            state[name] = tensor
        return state

    def to_host(self, state: Any) -> Any:
        return self._kind.to_host(state)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _averages_itself(model: torch.nn.Module) -> bool:
    """Whether the program has wrapped ``model`` in torch_xla's ``XlaFullyShardedDataParallel``."""
    return any(type(part).__name__ == "XlaFullyShardedDataParallel" for part in model.modules())


def _same(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return [id(one) for one in some] == [id(one) for one in others]
