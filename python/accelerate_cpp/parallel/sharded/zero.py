"""ZeRO: each process steps on its rows of weights that the processes of a host have in common.

Nothing is gathered: a layer computes with the whole weights of the host, and gradients are summed over the processes
into the rows that each steps on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.devices.shards import rows_wrapped
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.compilation import inside_compiler, interpreted
from accelerate_cpp.parallel.sharded.first_values import FirstValues
from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy
from accelerate_cpp.parallel.sharded.host_weights import HostWeights
from accelerate_cpp.parallel.sharded.replaced_parameters import places_of
from accelerate_cpp.parallel.sharded.scattered_gradients import (
    ScatteredGradients,
    ScatteredWeight,
    finish_all,
    given_up_on_errors,
)
from accelerate_cpp.parallel.sharded.widened_weights import WidenedWeights
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin


class WholeWeights:
    """The two forms of the parameters of one model: rows, as optimizers have them, and whole, as layers compute.

    Modules have the whole ones during forward and backward passes only.

    Attributes:
        without_values: names of weights that a checkpoint has yet to bring.
    """

    def __init__(self, shared: HostWeights) -> None:
        self.shared = shared  # lives as long as this does
        self.without_values: list[str] = []
        self.gradients: ScatteredGradients | None = None
        self._places: list[tuple[dict[str, Any], str, ScatteredWeight]] = []
        self._weights: list[ScatteredWeight] = []

    def add(self, weight: ScatteredWeight, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        """One more weight, and the modules' dictionaries that hold it, with its names there."""
        self._weights.append(weight)
        self._places += [(holder, name, weight) for holder, name in places]

    def show_rows(self) -> None:
        """Modules have the rows of this process."""
        for holder, name, weight in self._places:
            holder[name] = weight.shard

    def show_whole(self) -> None:
        """Modules have the whole weights.

        Raises:
            InvalidArgument: some have no values yet.
        """
        if self.without_values:
            raise InvalidArgument(
                f"{self.without_values[0]!r} was on the meta device on all ranks and has no values yet; load a "
                "checkpoint before the model computes"
            )
        thawed = False
        for weight in self._weights:
            if weight.whole.requires_grad != weight.shard.requires_grad:
                weight.whole.requires_grad_(weight.shard.requires_grad)
                thawed = True
        if thawed and self.gradients is not None:
            self.gradients.watch()
        for holder, name, weight in self._places:
            holder[name] = weight.whole

    def wholes(self) -> list[torch.nn.Parameter]:
        """The parameters with which layers compute."""
        return [weight.whole for weight in self._weights]

    def has_gradients(self) -> bool:
        """Whether a weight has a gradient, of its rows or, where it was not averaged, as a whole."""
        return any(one.shard.grad is not None or one.whole.grad is not None for one in self._weights)

    def follow(self, model: torch.nn.Module) -> None:
        """Changes the form with the passes through ``model``."""

        @interpreted(recursive=True)
        def before_forward(*_: Any) -> None:
            self.shared.publish_changes()
            self.show_whole()

        @interpreted(recursive=True)
        def after_forward(_: Any, __: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # else a backward pass computes it again, and needs more
                self.show_rows()
            for one in tree_leaves(output):
                if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                    one.register_hook(before_backward)

        def before_backward(_: torch.Tensor) -> None:
            if self.gradients is not None and not self.gradients.is_announced:
                self.gradients.prepare()
                torch.autograd.Variable._execution_engine.queue_callback(self.show_rows)
            self.show_whole()  # for activations that are computed again
            if self.gradients is not None and self.gradients.is_announced:
                self.gradients.begin()  # also where no gradient arrives in this process

        model.__deepcopy__ = _refuse_copies  # type: ignore[assignment]
        model.register_forward_pre_hook(before_forward, prepend=True)
        model.register_forward_hook(after_forward, always_call=True)


def _refuse_copies(_: Any) -> NoReturn:
    raise InvalidArgument(
        "copy.deepcopy of a sharded model: its weights are in the common memory of the processes; copy the module "
        "before it is prepared, and load what accelerator.get_state_dict(model) returns"
    )


class ZeroStrategy(FullyShardedStrategy):
    """Each process steps on its rows of the weights, and keeps gradients and optimizer states of these alone.

    Args:
        device: of this process: a CPU.
        plugin: what the user asked for.
        mesh: of the run.
        low_precision: whether forward passes compute in less than fp32.

    Raises:
        InvalidArgument: the device has memory of its own, or the plugin has options of ``fully_shard`` alone.
    """

    def __init__(
        self, device: torch.device, plugin: FullyShardedDataParallelPlugin, mesh: Mesh, low_precision: bool
    ) -> None:
        if device.type != "cpu":
            raise InvalidArgument(
                f"FullyShardedDataParallelPlugin: zero_stage={plugin.stage} on {device}; only processes that compute "
                "on CPUs have their weights in common. Leave it out"
            )
        super().__init__(device, plugin, mesh, low_precision)
        self._whole: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[WholeWeights]] = weakref.WeakKeyDictionary()

    @property
    def _has_host_weights(self) -> bool:
        return True

    def _shard(
        self, model: torch.nn.Module, units: Sequence[torch.nn.Module], ignored: set[torch.nn.Parameter]
    ) -> None:
        """``units`` do not matter, as nothing is gathered."""
        first = FirstValues(model, self._device)
        scalars = {weight for weight in model.parameters() if weight.ndim == 0}  # have no rows
        left = ignored | scalars
        self._ignored[model] = [one for one in model.parameters() if one in left and one.requires_grad]
        widening = WidenedWeights(model, self._low_precision)
        before = places_of(model)
        names = [name for name, weight in model.named_parameters() if weight not in left]
        weights = [weight for weight in model.parameters() if weight not in left]
        host = self._host_group()
        shared = HostWeights(host, [(weight.shape, widening.dtype_of(weight)) for weight in weights])
        whole_weights = WholeWeights(shared)
        whole_weights.without_values = [
            name for name, weight in zip(names, weights, strict=True) if first.has_no_values(weight)
        ]
        first.bring([*(one for one in model.parameters() if one in left), *model.buffers()], widening.dtype_of)
        mesh = self._torch_mesh()
        scattered, shards = [], []
        for index, (name, weight, whole) in enumerate(zip(names, weights, shared.wholes, strict=True)):
            holders = first.holders_of(weight)
            values = whole.new_zeros(shared.slice_of(whole).shape)
            if not first.has_no_values(weight):
                first.bring([weight], widening.dtype_of)
                holder, attribute = holders[0]
                values = shared.slice_of(holder[attribute].detach())
            rows = shared.place(index, values)
            shard = torch.nn.Parameter(rows_wrapped(rows, whole, mesh), requires_grad=weight.requires_grad)
            parameter = torch.nn.Parameter(whole, requires_grad=weight.requires_grad)
            scattered.append(ScatteredWeight(name, parameter, shard))
            shards.append(shard)
            whole_weights.add(scattered[-1], holders)
            for holder, attribute in holders:
                holder[attribute] = shard  # what the rank had is freed
        self._replaced.note(before, places_of(model))
        shared.are_stepped_by(shards)
        shared.publish()
        replicas = mesh.get_group("dp_replicate") if "dp_replicate" in (mesh.mesh_dim_names or ()) else None
        trainable = [one for one in scattered if one.whole.is_floating_point() or one.whole.is_complex()]
        whole_weights.gradients = ScatteredGradients(
            trainable, mesh.get_group("dp_shard"), replicas, whole_weights.show_rows, overlaps=len(host.hosts) > 1
        )
        whole_weights.gradients.peers = self._gradients
        whole_weights.follow(model)
        self._host_weights.append(weakref.ref(shared, self._host_weights.remove))
        self._whole[model] = weakref.ref(whole_weights)
        widening.tell()

    def _forms(self) -> list[WholeWeights]:
        """Of the models that are prepared, in order."""
        known = [self._whole.get(inside_compiler(model)) for model in self.models()]
        return [form for form in (reference() for reference in known if reference is not None) if form is not None]

    def _form_of(self, model: torch.nn.Module) -> WholeWeights | None:
        for prepared in self.models():
            if inside_compiler(prepared) is inside_compiler(model) or self.unwrap(prepared) is model:
                reference = self._whole.get(inside_compiler(prepared))
                return None if reference is None else reference()
        return None

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        gradients = self._gradients()
        for one in gradients:
            one.expect()
        with given_up_on_errors(gradients):
            loss.backward(**kwargs)
            finish_all(gradients)

    def _gradients(self) -> list[ScatteredGradients]:
        return [form.gradients for form in self._forms() if form.gradients is not None]

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """From stage 2 on, gradients are averaged all the same, as a process is not to hold all of them."""
        form = self._form_of(model)
        if form is None:
            return super().no_sync(model)
        return self._local_gradients(model, form) if self._plugin.stage == 1 else nullcontext()

    @contextmanager
    def _local_gradients(self, model: torch.nn.Module, form: WholeWeights) -> Iterator[None]:
        inner = inside_compiler(model)
        assert form.gradients is not None
        form.gradients.synchronizing = False
        self._local.add(inner)
        try:
            yield
        finally:
            form.gradients.synchronizing = True
            self._local.discard(inner)

    def leaves(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        form = self._form_of(model)
        return super().leaves(model) if form is None else [*form.wholes(), *self._ignored[inside_compiler(model)]]

    def has_gradients(self, model: torch.nn.Module) -> bool:
        form = self._form_of(model)
        return super().has_gradients(model) or (form is not None and form.has_gradients())

    def _free_gathered(self, inner: torch.nn.Module) -> None:
        form = self._form_of(inner)
        if form is not None:
            form.show_rows()

    def dtypes_on_the_way(
        self, model: torch.nn.Module, parameter: torch.nn.Parameter
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        return None, parameter.dtype if parameter.requires_grad else None

    def restore_model(self, model: torch.nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        super().restore_model(model, state, **kwargs)
        form = self._form_of(model)
        if form is not None:
            form.without_values = [name for name in form.without_values if name not in state]
