"""Data parallelism: every process holds the whole model, and gradients are averaged while they are computed.

If the CPU backend is ours, the averaging is also ours (:class:`DataParallel`): over shared memory, or on accelerators
over torch's backend for these. Otherwise torch's own ``DistributedDataParallel`` does it, which is the default on
accelerators; there, ``InitProcessGroupKwargs(backend="cpu:shm,cuda:nccl")`` selects ours.

A model that is in shards already has no copies to be averaged; who sharded it averages its gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accelerate_cpp.comm.compression_hooks import hook_for
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.compilation import inside_compiler, without_compiler
from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker
from accelerate_cpp.parallel.last_to_train import LastToTrain, leave
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.single import SingleStrategy, weigh_averages
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import HandOver, Layout, ModelSteps, Strategy

if TYPE_CHECKING:
    from accelerate_cpp.parallel.sharded.sharded_strategy import ShardedStrategy

M = TypeVar("M", bound=torch.nn.Module)
_log = logging.getLogger(__name__)
_HOOK_OPTIONS: dict[str, Any] = {"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}}


class DataParallelStrategy(SingleStrategy):
    """Every process holds the whole model; gradients are averaged. A model that has none is used as it is, and so is
    one that is in shards already.

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
        self._wrapped: list[weakref.ref[DataParallel]] = []
        self._of_torch: list[weakref.ref[DistributedDataParallel]] = []
        self._frozen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._in_shards: ShardedStrategy | None = None  # for models that are, once there is one
        self._joins_wrappers = False

    def _prepare(self, model: torch.nn.Module, steps: ModelSteps) -> torch.nn.Module:
        if not is_sharded(model) or not _is_trained(model):
            return super()._prepare(model, steps)
        if self._in_shards is None:
            from accelerate_cpp.parallel.sharded.sharded_strategy import ShardedStrategy  # takes a while to import

            self._in_shards = ShardedStrategy(self._device)
        self._frozen.discard(inside_compiler(model))
        return self._in_shards.prepare(Bundle(models=[model]), [steps]).models[0]

    def _strategy_of(self, model: torch.nn.Module) -> Strategy:
        """What knows ``model``: of copies that are averaged, the general answers."""
        own = self._in_shards
        return own if own is not None and own.has(model) else _COPIES

    @property
    def processes_per_batch(self) -> int:
        return 1 if self._in_shards is None else self._in_shards.processes_per_batch

    def in_shards(self, model: torch.nn.Module) -> bool:
        return self._in_shards is not None and self._in_shards.has(model)

    def is_thawed(self, model: torch.nn.Module) -> bool:
        inner = inside_compiler(model)
        return inner in self._frozen and _is_trained(inner)

    def models(self) -> list[torch.nn.Module]:
        in_shards = [] if self._in_shards is None else self._in_shards.models()
        return [*_living(self._wrapped), *_living(self._of_torch), *in_shards]

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        wrapper = inside_compiler(model)
        context: AbstractContextManager[None] = (
            wrapper.no_sync()
            if isinstance(wrapper, DistributedDataParallel)
            else self._strategy_of(model).no_sync(model)
        )
        return context

    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        # Torch refuses a loss without a graph, before any rank could wait for another.
        models = _living(self._wrapped) if loss.requires_grad else []
        totals = {} if weights is None else weights.totals
        if totals and self._joins_wrappers:
            raise InvalidArgument(
                "accelerator.backward(loss, weight=...) in join_uneven_inputs: a process that has no batches left "
                "follows torch's wrapper, not the weights of the others; accumulate gradients "
                "(gradient_accumulation_steps above 1), with which it repeats its last batch instead, use mode='stop', "
                "or on the CPU the backend 'shm'"
            )
        for model in models:
            model.expect_backward()
            if model in totals:
                model.set_weight(totals[model])
        try:
            loss.backward(**kwargs)
            for model in models:
                model.backward_ended()
        except BaseException as error:
            for model in models:
                model.backward_failed(f"its backward pass raised {type(error).__name__}: {error}")
            if self._in_shards is not None:
                self._in_shards.forget_pass()
            raise
        finally:
            for model in models if totals else ():
                model.set_weight(None)  # of models that the loss does not depend on
        if weights is not None and totals:
            of_torch = _living(self._of_torch)
            weigh_averages(of_torch, weights, self._device, dist.get_world_size())
        if self._in_shards is not None:
            self._in_shards.finish_pass(weights)
        self._warn_of_local_gradients()

    def needs_all_ranks(self, models: Iterable[Any]) -> bool:
        return self._in_shards is not None and self._in_shards.needs_all_ranks(models)

    @contextmanager
    def join(self, models: Iterable[Any], hand_over: HandOver | None = None) -> Iterator[None]:
        models = list(models)
        models = [inner for model in models if (inner := inside_compiler(model)) not in self._frozen]
        if not models:
            yield
            return
        last = LastToTrain(models[0])
        of_torch = _living(self._of_torch)
        self._joins_wrappers = any(model is one for model in models for one in of_torch)
        try:
            with Join([*models, last], divide_by_initial_world_size=False):
                yield
        finally:
            self._joins_wrappers = False
            for model in models:
                leave(model)
        found = last.find()
        if found is not None and hand_over is not None:
            hand_over(*found)

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        given = list(parameters)
        own = self._in_shards
        knows = own is not None and own.knows_any_of(given)
        clip = own.clip_grad_norm if own is not None and knows else super().clip_grad_norm
        return clip(given, max_norm, norm_type, measured)

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return super().stepping(optimizer) if self._in_shards is None else self._in_shards.stepping(optimizer)

    def any_rank(self, found: bool) -> bool:
        """Averages are the same on all ranks, shards are not."""
        return found if self._in_shards is None else self._in_shards.any_rank(found)

    def leaves(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        return self._strategy_of(model).leaves(model)

    def has_gradients(self, model: torch.nn.Module) -> bool:
        return self._strategy_of(model).has_gradients(model)

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._strategy_of(model).named_parameters(model)

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        return self._strategy_of(model).model_state(self.unwrap(model), here)

    @property
    def layout(self) -> Layout:
        """That of shards as soon as one model is: plain files hold the whole of each state."""
        return "plain" if self._in_shards is None or not self._in_shards.models() else self._in_shards.layout

    def local_state(self, model: torch.nn.Module) -> dict[str, Any]:
        return self._strategy_of(model).local_state(self.unwrap(model))

    def restore_model(self, model: torch.nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        self._strategy_of(model).restore_model(model, state, **kwargs)

    def dtypes_on_the_way(
        self, model: torch.nn.Module, parameter: torch.nn.Parameter
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        is_wrapped = isinstance(inside_compiler(model), DistributedDataParallel)
        return None, parameter.dtype if is_wrapped and parameter.requires_grad else None

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        wrapper = inside_compiler(model)
        return without_compiler(wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper)

    def _warn_of_local_gradients(self) -> None:
        """Warns, once for each model that was frozen when it was prepared, that its gradients are not averaged."""
        for model in set(self._frozen) - set(self._warned):
            trained = {id(weight) for weight in model.parameters() if weight.requires_grad and weight.grad is not None}
            if trained - {id(weight) for wrapper in self.models() for weight in wrapper.parameters()}:
                self._warned.add(model)
                _log.warning(
                    "%s had no parameter that requires a gradient when it was prepared. It has gradients now, and "
                    "they are not averaged over the processes; pass the model to prepare() again before you train it",
                    type(model).__name__,
                )

    def _distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        if not _is_trained(model):
            self._frozen.add(model)
            return model
        self._frozen.discard(model)
        on_cpu = self._device.type == "cpu"
        in_one_place = on_cpu or {parameter.device for parameter in model.parameters()} == {self._device}
        backend = core_backend() if in_one_place else None
        wrapped: DataParallel | DistributedDataParallel
        if backend is None:
            device_ids = None if on_cpu else [self._device.index]
            wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)
            self._of_torch.append(weakref.ref(wrapped, self._of_torch.remove))
        else:
            known = ("bucket_cap_mb", "broadcast_buffers")
            options = {name: self._ddp_kwargs[name] for name in known if name in self._ddp_kwargs}
            options["make_device_group"] = device_group_maker(self._device, backend.timeout)
            options["device_kernels"] = env_table.CUDA_KERNELS.get()
            options["nccl"] = env_table.NCCL.get()
            wrapped = DataParallel(model, backend.communicator, backend.timeout, **options)
            self._wrapped.append(weakref.ref(wrapped, self._wrapped.remove))
        hook = hook_for(*self._hook_options)
        if hook is not None:
            wrapped.register_comm_hook(*hook)
        return wrapped


_COPIES = SingleStrategy()


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _living(references: Iterable[weakref.ref[M]]) -> list[M]:
    """The modules that still exist, in the order in which they were prepared, which is the same on all ranks."""
    return [model for model in (reference() for reference in references) if model is not None]


@contextmanager
def synchronising(model: torch.nn.Module) -> Iterator[None]:
    """Inside this block, backward passes through ``model`` synchronise gradients, even after a pass in no_sync."""
    model = inside_compiler(model)
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    switches = ("require_backward_grad_sync", "require_forward_param_sync")
    before = {name: getattr(model, name) for name in switches if hasattr(model, name)}
    model.__dict__.update(dict.fromkeys(before, True))
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.__dict__.update(before)
