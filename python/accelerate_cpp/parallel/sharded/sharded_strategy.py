"""Training models that are in shards, whoever sharded them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.devices.shards import is_sharded_tensor, local_part, sharded_like
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.compilation import inside_compiler
from accelerate_cpp.parallel.sharded import version_1
from accelerate_cpp.parallel.sharded.clipping import clip_shards
from accelerate_cpp.parallel.sharded.fully_sharded_units import units_in, weights_of
from accelerate_cpp.parallel.sharded.given_models import processes_per_batch, take_over
from accelerate_cpp.parallel.sharded.shared_failures import groups_of, raised_on_all
from accelerate_cpp.parallel.single import SingleStrategy, weigh_averages
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import HandOver, Layout, ModelSteps


def _clear_with_model(model: torch.nn.Module, strategy: ShardedStrategy) -> None:
    """Lets ``model.zero_grad()`` clear the gradients of shards, also while the root has its parameters whole."""
    zero_grad = type(model).zero_grad
    its_model, its_strategy = weakref.ref(model), weakref.ref(strategy)

    def clear(set_to_none: bool = True) -> None:
        own, preparer = its_model(), its_strategy()
        assert own is not None  # it has this function
        zero_grad(own, set_to_none)
        for _, shard in preparer.named_parameters(own) if preparer is not None else ():
            if shard.grad is not None and set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()

    model.zero_grad = clear  # type: ignore[method-assign]


def _clip_with_model(model: torch.nn.Module, strategy: ShardedStrategy) -> None:
    """``model.clip_grad_norm_``, which programs for version 1 call; a model that has such a function keeps it."""
    if hasattr(type(inside_compiler(model)), "clip_grad_norm_"):
        return
    its_model, its_strategy = weakref.ref(model), weakref.ref(strategy)

    def clip_grad_norm_(max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        own, preparer = its_model(), its_strategy()
        assert own is not None  # it has this function
        if preparer is None:
            raise InvalidArgument("clip_grad_norm_: the Accelerator that prepared this model is gone; prepare it again")
        return preparer.clip_grad_norm(preparer._stepped(own), max_norm, norm_type)

    model.clip_grad_norm_ = clip_grad_norm_  # type: ignore[assignment]


class ShardedStrategy(SingleStrategy):
    """Each process has its shards of the parameters, the gradients and the states of the optimizer.

    Models have been sharded before they are prepared, by torch's ``fully_shard``, by the wrapper of FSDP's version 1 or
    by a layout of ``DTensor`` s. Who sharded a model averages its gradients; what is left to do is done here.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # By model, the parameters of which each process has the whole.
        self._ignored: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )
        self._held: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, torch.nn.Parameter]]] = (
            weakref.WeakKeyDictionary()
        )
        # By model, of the processes that share out its parameters.
        self._groups: weakref.WeakKeyDictionary[torch.nn.Module, set[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
        # By model that splits layers itself, over how many processes.
        self._sharing: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._in_order: list[weakref.ref[torch.nn.Module]] = []  # as prepared, which is the same on all ranks
        self._local: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # inside no_sync

    def _prepare(self, model: torch.nn.Module, steps: ModelSteps) -> torch.nn.Module:
        """The model is where it is, and its modules stay the ones that were sharded."""
        inner = inside_compiler(model)
        _free_units(inner)
        self._ignored[inner] = take_over(inner, self._device)
        self._sharing[inner] = processes_per_batch(inner)
        return steps.compile(self._distribute(steps.cast(model)))

    def models(self) -> list[torch.nn.Module]:
        return [model for model in (reference() for reference in self._in_order) if model is not None]

    def has(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` is one of those, compiled or not."""
        inner = self.unwrap(model)
        return any(self.unwrap(own) is inner for own in self.models())

    def knows_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``parameters`` belongs to one of those models."""
        own = {id(parameter) for model in self.models() for parameter in (*self._stepped(model), *model.parameters())}
        return any(id(parameter) in own for parameter in parameters)

    @property
    def processes_per_batch(self) -> int:
        return max((self._sharing.get(inside_compiler(model), 1) for model in self.models()), default=1)

    def in_shards(self, model: torch.nn.Module) -> bool:
        return self.has(model)

    def _distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        self._held[self.unwrap(model)] = list(model.named_parameters())
        self._groups[self.unwrap(model)] = groups_of(model)
        _clear_with_model(model, self)
        _clip_with_model(model, self)
        self._in_order.append(weakref.ref(model, self._in_order.remove))
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return self._without_sync(model)

    @contextmanager
    def _without_sync(self, model: torch.nn.Module) -> Iterator[None]:
        inner = inside_compiler(model)
        units = units_in(inner)
        with ExitStack() as stack:
            for wrapper in version_1.outermost_in(inner):
                stack.enter_context(wrapper.no_sync())
            for unit in units:
                unit.set_requires_gradient_sync(False, recurse=False)
            self._local.add(inner)
            try:
                yield
            finally:
                for unit in units:
                    unit.set_requires_gradient_sync(True, recurse=False)
                self._local.discard(inner)

    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        groups = set().union(*(self._groups.get(self.unwrap(model), set()) for model in self.models()))
        try:
            with raised_on_all(groups):
                self._backward(loss, **kwargs)
        except BaseException:
            self.forget_pass()
            raise
        self.finish_pass(weights)

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def forget_pass(self) -> None:
        """After a backward pass that raised: its gradients are not added to those of the next."""
        from accelerate_cpp.parallel.sharded.failed_passes import forget_pass

        for model in self.models():
            forget_pass(model)

    def finish_pass(self, weights: PassWeights | None) -> None:
        """After a backward pass: what torch leaves undone. Collective."""
        self._average_ignored()
        if weights is not None and weights.totals:
            models = [model for model in self.models() if model in weights.totals]
            weigh_averages(models, weights, self._device, dist.get_world_size())

    def _stepped(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters of ``model`` that optimizers step on."""
        return [parameter for _, parameter in self.named_parameters(self.unwrap(model))]

    def _average_ignored(self) -> None:
        """Torch leaves the gradients of parameters that are not sharded as they are on each rank. Collective."""
        for model, parameters in self._ignored.items():
            if not parameters or model in self._local:
                continue
            has = torch.tensor([float(weight.grad is not None) for weight in parameters], device=self._device)
            dist.all_reduce(has, op=dist.ReduceOp.MAX)
            for weight, used in zip(parameters, has.tolist(), strict=True):
                if used:
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
                    weight.grad /= dist.get_world_size()

    def needs_all_ranks(self, models: Iterable[Any]) -> bool:
        return any(map(self.has, models))

    def join(self, models: Iterable[Any], hand_over: HandOver | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        groups: dict[int, dist.ProcessGroup] = {}
        for model in self.models():
            groups |= version_1.groups_of(model)
        return clip_shards(self.as_stepped(parameters), max_norm, norm_type, measured, groups)

    def as_stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """``parameters`` as optimizers hold them: after a forward pass without a backward one, models show others."""
        stepped = {
            id(one._unsharded_param): one.sharded_param
            for model in self.models()
            for one, _ in weights_of(inside_compiler(model))
            if hasattr(one, "_unsharded_param")
        }
        return [stepped.get(id(one), one) for one in parameters]

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """What has been gathered is freed: it is not what is stepped on, and would be computed with afterwards."""
        for model in self.models():
            _free_units(inside_compiler(model))
        return self._stepping(optimizer)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return nullcontext()

    def any_rank(self, found: bool) -> bool:
        flag = torch.tensor(float(found), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        """On the CPU, or empty unless ``here``. Of version 2, never more than one tensor is gathered at a time."""
        inner = self.unwrap(model)
        self._free_gathered(inner)
        with version_1.whole_states(inner):
            state = inner.state_dict()
        whole = {}
        for name, value in state.items():
            gathered = value.full_tensor() if is_sharded_tensor(value) else value
            if here:
                whole[name] = gathered.cpu() if isinstance(gathered, torch.Tensor) else gathered
        return whole

    def local_state(self, model: torch.nn.Module) -> dict[str, Any]:
        inner = self.unwrap(model)
        version_1.refuse(inner, "save_state")
        self._free_gathered(inner)
        state = super().local_state(model)
        if self._writes_copies:
            return state
        return {name: value for name, value in state.items() if is_sharded_tensor(value)}

    @property
    def _writes_copies(self) -> bool:
        """Whether this process writes what several have, such as buffers, of which all have to be of one process."""
        return dist.get_rank() == 0

    def _free_gathered(self, inner: torch.nn.Module) -> None:
        """After a forward pass some units have whole parameters, which are not what the optimizer steps.

        Torch's hooks on state dicts free them, but those of a module from which a copy with compiled regions was made
        do not.
        """
        for model in self.models():
            if self.unwrap(model) is inner:
                _free_units(model)

    def leaves(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The whole parameters of units, which the sharded ones only replace between passes."""
        return [*_computed_with(model), *version_1.flat_parameters(model), *super().leaves(model)]

    def has_gradients(self, model: torch.nn.Module) -> bool:
        if super().has_gradients(model) or any(one.grad is not None for one in self._stepped(model)):
            return True
        return any(one.grad is not None for one in (*_computed_with(model), *version_1.flat_parameters(model)))

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of when it was prepared: after a forward pass, units have whole ones until they are sharded again."""
        return iter(self._held.get(model) or list(model.named_parameters()))

    @property
    def layout(self) -> Layout:
        return "shards"

    def restore_model(self, model: torch.nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Each process copies its part of one tensor after the other; what is no tensor is loaded by the model."""
        version_1.refuse(model, "load_state")
        self._free_gathered(model)
        own = model.state_dict()
        others = {}
        with torch.no_grad():
            for name, value in state.items():
                target: Any = own.get(name)
                if isinstance(target, torch.Tensor):
                    local_part(target).copy_(local_part(sharded_like(target, value)))
                elif target is not None:
                    others[name] = value
        if others:
            model.load_state_dict(others, strict=False)


def _free_units(model: torch.nn.Module) -> None:
    for unit in units_in(model):
        unit.reshard()


def _computed_with(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that units have once they have been gathered, which autograd knows."""
    return [one._unsharded_param for one, _ in weights_of(model) if hasattr(one, "_unsharded_param")]
