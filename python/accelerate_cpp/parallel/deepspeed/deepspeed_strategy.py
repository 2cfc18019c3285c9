"""Training by engines of DeepSpeed: they average and clip gradients, shard, and step within the backward pass.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.deepspeed.engine_files import load_engine, save_engine
from accelerate_cpp.parallel.deepspeed.engines import (
    compile_engine,
    depends_on,
    for_evaluation,
    keep_norm,
    let_gradients_through,
    make_engine,
    mark_outputs,
    members_of,
    passed,
)
from accelerate_cpp.parallel.deepspeed.library import joined_library
from accelerate_cpp.parallel.deepspeed.sequences import average_over_parts, sequence_groups, split_loader
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.step_weights import PassWeights
from accelerate_cpp.parallel.strategy import Layout, ModelSteps
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin, active_plugin
from accelerate_cpp.plugins.deepspeed_values import (
    RunOfDeepSpeed,
    configuration_for,
    settle_accumulation,
    settle_batch_sizes,
)
from accelerate_cpp.plugins.parallelism import DeepSpeedSequenceParallelConfig

__all__ = ["DeepSpeedStrategy"]


def _notices_backward(engine: Any) -> bool:
    """Whether ``engine`` does what is due in a backward pass also if another engine's has been called."""
    return bool(engine._support_torch_style_backward)


def _refuse_others(engines: Sequence[Any]) -> None:
    """Raises ``InvalidArgument`` if a loss gives gradients to ``engines``, which another Accelerator steps."""
    for engine in engines:
        raise InvalidArgument(
            f"accelerator.backward: the loss also depends on {type(engine.module).__name__}, which another Accelerator "
            "trains, and DeepSpeed would add these gradients to those of its next step; call requires_grad_(False) of "
            "that model while this loss is computed, or prepare both models with one Accelerator, which steps both"
        )


def _trains(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


class DeepSpeedStrategy(SingleStrategy):
    """Makes engines of models and their optimizers.

    Args:
        device: of this process.
        plugins: one, or several by name, of which the selected one is for what is prepared next.
        mesh: of the run.
        sequences: how sequences are split over processes, if they are.
    """

    def __init__(
        self,
        device: torch.device,
        plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin],
        mesh: Mesh,
        sequences: tuple[int, DeepSpeedSequenceParallelConfig] | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self._plugins = plugins
        self._sequences = sequences
        self._library = joined_library(device)
        self._run = RunOfDeepSpeed(mesh.world_size, mesh.world_size // (sequences[0] if sequences else 1), False)
        self._engines: list[weakref.ref[Any]] = []  # in the order in which they were prepared
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # which engines step
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # those of the engines that step
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._frozen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._not_synchronised: weakref.WeakSet[Any] = weakref.WeakSet()
        self._norms: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of the last gradients of each
        self._measured: weakref.WeakSet[Any] = weakref.WeakSet()  # engines whose next norm the program wants to know
        self._told: set[str] = set()

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected one."""
        return active_plugin(self._plugins)

    @property
    def steps_in_backward(self) -> bool:
        return True

    def engines(self) -> list[Any]:
        return [engine for engine in (reference() for reference in self._engines) if engine is not None]

    # Preparing

    def settle(self, accumulation_steps: int, loaders: Sequence[Any], split_batches: bool) -> int:
        self._run = RunOfDeepSpeed(self._run.num_processes, self._run.replicas, split_batches)
        steps = settle_accumulation(self.plugin, accumulation_steps)
        settle_batch_sizes(self.plugin, loaders, self._run)
        return steps

    def prepare(self, bundle: Bundle, steps: Sequence[ModelSteps] | None = None) -> Bundle:
        orders = [ModelSteps()] * len(bundle.models) if steps is None else steps
        optimizers, schedulers = list(bundle.optimizers), list(bundle.schedulers)
        owners = self._owners(optimizers, bundle.models)
        for place, (model, order) in enumerate(zip(list(bundle.models), orders, strict=True)):
            own = next((index for index, owner in owners.items() if owner is model), None)
            optimizer = None if own is None else optimizers[own]
            scheduled = self._schedule_of(optimizer, schedulers, single=len(optimizers) <= 1)
            prepared, stepping, scheduler = self._made(model, order, optimizer, scheduled)
            bundle.models[place] = prepared
            if own is not None:
                bundle.optimizers[own] = stepping
            if scheduled is not None and scheduler is not None:
                bundle.schedulers[schedulers.index(scheduled)] = scheduler
        return bundle

    def _owners(self, optimizers: Sequence[Any], models: Sequence[torch.nn.Module]) -> dict[int, torch.nn.Module]:
        """By the index of an optimizer, the model that it trains."""
        if not models:
            return {}  # each is refused by itself
        owners: dict[int, torch.nn.Module] = {}
        for index, optimizer in enumerate(optimizers):
            members = members_of(optimizer, models)
            if not members and len(models) == len(optimizers) == 1:
                members = list(models)
            if len(members) != 1 or members[0] in owners.values():
                found = ", ".join(type(model).__name__ for model in members) or "none of them"
                raise InvalidArgument(
                    "prepare: DeepSpeed makes an engine of one model and its optimizer, but "
                    f"{type(optimizer).__name__} steps parameters of "
                    f"{found}{' as another optimizer does' if len(members) == 1 else ''}; pass each model and one "
                    "optimizer of it to the same prepare"
                )
            owners[index] = members[0]
        return owners

    @staticmethod
    def _schedule_of(optimizer: Any, schedulers: Sequence[Any], single: bool) -> Any:
        own = [one for one in schedulers if getattr(one, "optimizer", None) is optimizer and optimizer is not None]
        return own[0] if own else schedulers[0] if single and len(schedulers) == 1 else None

    def _made(
        self, model: torch.nn.Module, steps: ModelSteps, optimizer: Any, scheduler: Any
    ) -> tuple[torch.nn.Module, Any, Any]:
        """The engine of ``model``, and the optimizer and the schedule that it steps, ``None`` if it steps none."""
        plugin = self.plugin
        steps_itself = optimizer is not None or (_trains(model) and "optimizer" in plugin.deepspeed_config)
        if not steps_itself and not plugin.hf_ds_config.is_zero3():
            self._frozen.add(model)
            return steps.place(model), None, None
        plugin.set_moe_leaf_modules(model)
        config = configuration_for(plugin, model, optimizer, scheduler, self._run)
        if not steps_itself:
            config = for_evaluation(config)
        options: dict[str, Any] = {}
        if self._sequences is not None:
            options["mpu"] = sequence_groups(model, *self._sequences, config["train_micro_batch_size_per_gpu"])
        made = make_engine(self._library, config, model, optimizer, scheduler, **options)
        if self._sequences is not None:
            average_over_parts(made.engine)
        plugin.make_engine_known()
        compile_engine(made.engine, steps.dynamo)
        mark_outputs(made.engine)
        keep_norm(made.engine, self._norms)
        self._measured.add(made.engine)
        self._engines.append(weakref.ref(made.engine))
        if steps_itself:
            self._trained.add(made.engine)
        else:
            let_gradients_through(made.engine)
        if made.optimizer is not None:
            self._optimizers.add(made.optimizer)
        stepped = made.scheduler if steps_itself else None
        if stepped is not None:
            self._schedulers.add(stepped)
        return made.engine, made.optimizer, stepped

    def adapted(self, loader: Any) -> Any:
        return split_loader(loader, self._device) if self._sequences is not None and self.engines() else loader

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if not self.steps_optimizer(optimizer):
            raise InvalidArgument(
                f"prepare: {type(optimizer).__name__} was given without its model, but DeepSpeed makes an engine of "
                "both; pass them to the same prepare"
            )
        return optimizer

    def steps_optimizer(self, optimizer: Any) -> bool:
        return optimizer in self._optimizers

    def steps_scheduler(self, scheduler: Any) -> bool:
        return scheduler in self._schedulers

    def is_thawed(self, model: torch.nn.Module) -> bool:
        return model in self._frozen and _trains(model)

    def release(self, models: Sequence[Any]) -> None:
        for engine in [one for one in self.engines() if any(one is model for model in models)]:
            engine.destroy()
            self._engines[:] = [one for one in self._engines if one() is not engine]
            self._trained.discard(engine)

    # Training

    def models(self) -> list[torch.nn.Module]:
        """None: no weight divides gradients, as engines average them."""
        return []

    def backward(self, loss: torch.Tensor, weights: PassWeights | None = None, **kwargs: Any) -> None:
        self.backward_and_step(loss, completes=True, **kwargs)

    def backward_and_step(
        self, loss: torch.Tensor, completes: bool, models: Sequence[torch.nn.Module] = (), **kwargs: Any
    ) -> None:
        trained = self._trained_engines()
        known = [engine for engine in trained if any(engine is model for model in models)] or trained
        if not known:
            raise InvalidArgument(
                "accelerator.backward: no model has been prepared with an optimizer, so DeepSpeed has no engine; pass "
                "both to one prepare"
            )
        reached = trained if len(trained) == 1 else depends_on(loss, trained)
        engines = [engine for engine in reached if engine in known] or known[:1]
        _refuse_others([engine for engine in reached if engine not in known])
        stepping = [engine for engine in engines if completes and engine not in self._not_synchronised]
        for engine in engines:
            if engine.managed_gradient_accumulation():  # else its step is the boundary
                engine.set_gradient_accumulation_boundary(engine in stepping)
        first, *others = engines
        managed = [engine for engine in self.engines() if engine is not first and not _notices_backward(engine)]
        with passed(managed):
            first.backward(loss, scale_wrt_gas=False, **kwargs)  # which has been divided
            for engine in others:
                if not _notices_backward(engine):
                    engine._backward_epilogue()
        for engine in stepping:
            self._step(engine)

    def _trained_engines(self) -> list[Any]:
        return [engine for engine in self.engines() if engine in self._trained]

    def _step(self, engine: Any) -> None:
        """The step of ``engine``; the norm of its gradients is kept, if it or the program wants it."""
        self._norms.pop(engine, None)
        asked = engine in self._measured
        self._measured.discard(engine)
        if asked and engine.optimizer is engine.basic_optimizer and not engine.gradient_clipping():
            gradients = [one.grad for one in engine.module.parameters() if one.grad is not None]
            self._norms[engine] = torch.nn.utils.get_total_norm(gradients)
        engine.step()
        norm = engine.get_global_grad_norm()
        if norm is not None:
            self._norms[engine] = norm

    @contextmanager
    def _local(self, engine: Any) -> Iterator[None]:
        already = engine in self._not_synchronised
        self._not_synchronised.add(engine)
        try:
            yield
        finally:
            if not already:
                self._not_synchronised.discard(engine)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return self._local(model)

    @property
    def can_join(self) -> bool:
        return False

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """The norm of the last step's gradients, which its engine has clipped; NaN if it does not measure it."""
        owners = self._owners_of(parameters)
        self._measured.update(owners)
        held = {float(engine.gradient_clipping()) for engine in owners}
        if held - {float(max_norm)} and f"{max_norm}" not in self._told:
            self._told.add(f"{max_norm}")
            used = ", ".join(f"{one:g}" for one in sorted(held))
            warnings.warn(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but DeepSpeed, which steps in backward, has "
                f"clipped already with gradient_clipping={used} of its configuration (0 is none), which counts; make "
                "them equal",
                stacklevel=4,
            )
        norms = [torch.as_tensor(self._norms.get(engine, math.nan), dtype=torch.float32) for engine in owners]
        joint: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.detach().reshape(()) for norm in norms]))
        return joint

    def _owners_of(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """The engines that step one of ``parameters``; all of those that step where it is none."""
        trained = self._trained_engines()
        if len(trained) == 1:
            return trained
        asked = {id(parameter) for parameter in parameters}
        own = [one for one in trained if any(id(parameter) in asked for parameter in one.module.parameters())]
        return own or trained

    # Checkpoints and answers

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return super().unwrap(model.module if model in self.engines() else model)  # type: ignore[arg-type]

    def in_shards(self, model: torch.nn.Module) -> bool:
        engine: Any = model
        return model in self.engines() and (engine.zero_optimization_partition_weights() or engine.autotp_size() > 1)

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        engine: Any = model
        if not self.in_shards(model):
            return _on_their_own(self.unwrap(model).state_dict())
        if engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save():
            raise InvalidArgument(
                "get_state_dict: the configuration of DeepSpeed has stage3_gather_16bit_weights_on_model_save=False in "
                "zero_optimization, so the weights of stage 3 are not gathered; set it to true (zero3_save_16bit_model "
                "of the plugin), or call save_state and run zero_to_fp32.py in the folder"
            )
        state = engine._consolidated_16bit_state_dict()
        return _on_their_own(state or {}, engine.module.parameters()) if here else {}

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those that the optimizer of its engine holds: in ZeRO, parts of long tensors without names."""
        engine = next((one for one in self.engines() if model is one or model is one.module), None)
        groups = getattr(getattr(engine, "optimizer", None), "param_groups", [])
        held = {id(parameter): parameter for group in groups for parameter in group["params"]}
        own = list(super().named_parameters(model))
        yield from own
        yield from (("", held[one]) for one in held.keys() - {id(parameter) for _, parameter in own})

    @property
    def layout(self) -> Layout:
        return "engines"

    def save_engines(
        self,
        models: Sequence[Any],
        folder: Path,
        tags: Sequence[str],
        write: Callable[[Path, Any], object],
        **options: Any,
    ) -> Exception | None:
        trained = self._saved(models, tags)
        failures = [
            save_engine(engine, folder, tag, write, is_first=tag == trained[0][1], **options) for engine, tag in trained
        ]
        return next((one for one in failures if one is not None), None)

    def load_engines(
        self, models: Sequence[Any], folder: Path, tags: Sequence[str], read: Callable[..., Any], **options: Any
    ) -> None:
        for engine, tag in self._saved(models, tags):
            load_engine(engine, folder, tag, read, **options)

    def _saved(self, models: Sequence[Any], tags: Sequence[str]) -> list[tuple[Any, str]]:
        """Engines with their tags; those of models that are not trained have nothing to save, and refuse it."""
        return [(model, tag) for model, tag in zip(models, tags, strict=True) if model in self._trained]


def _on_their_own(state: Mapping[str, Any], live: Iterable[torch.Tensor] = ()) -> dict[str, Any]:
    """``state`` with copies of tensors that are parts of longer ones, which would be saved whole, or that are trained
    on.

    What is tied stays tied.

    Args:
        live: parameters that go on changing.
    """
    changing = {parameter.data_ptr() for parameter in live if parameter.numel()}
    copies: dict[Any, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_part = value.untyped_storage().nbytes() > value.nbytes
        if not is_part and value.data_ptr() not in changing:
            return value
        place = value.data_ptr(), value.dtype, value.shape, value.stride()
        if place not in copies:
            copies[place] = value.detach().clone()
        return copies[place]

    return {name: own(value) for name, value in state.items()}
