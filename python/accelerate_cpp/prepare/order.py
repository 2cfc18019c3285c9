"""The steps of ``prepare``: place, precision, compile, distribute; then loaders, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from accelerate_cpp.config import env_table
from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.devices.host_memory import keep_freed_memory, return_free_memory
from accelerate_cpp.devices.placing import place as place_on
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.compilation import allow_tf32, inside_compiler
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import ModelSteps
from accelerate_cpp.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler
from accelerate_cpp.plugins.handlers import AutocastKwargs
from accelerate_cpp.plugins.split_sequences import _attach_context_parallel_hooks
from accelerate_cpp.precision.forward import install
from accelerate_cpp.precision.fp8 import convert_to_fp8
from accelerate_cpp.precision.master_weights import master_dtypes
from accelerate_cpp.precision.plan import PrecisionPlan, plan_for
from accelerate_cpp.prepare.compile_regions import compile_prepared, compile_prepared_regions
from accelerate_cpp.prepare.private_steps import PreparationSteps

__all__ = [
    "autocast_options",
    "evaluated",
    "is_prepared",
    "placements_of",
    "precision_plan",
    "prepare_together",
    "remember",
]

T = TypeVar("T")
_OPTIMIZERS = (torch.optim.Optimizer, DummyOptim)
_SCHEDULES_OF_DEEPSPEED = "deepspeed.runtime.lr_schedules"


def is_prepared(item: Any) -> bool:
    """Whether ``item`` is what ``prepare`` returned."""
    return bool(getattr(item, "_is_accelerate_prepared", False))


def remember(prepared: list[Any], item: T) -> T:
    """Marks ``item`` as prepared, adds it to the list of its kind once, and returns it."""
    object.__setattr__(item, "_is_accelerate_prepared", True)  # a compiled module would hand it on to the one inside
    if not any(known is item for known in prepared):
        prepared.append(item)
    return item


def placements_of(items: tuple[Any, ...], placements: Sequence[bool | None] | None) -> list[bool | None]:
    """For each of ``items``, whether it is to be moved to the device; ``InvalidArgument`` if the numbers differ."""
    if placements is None:
        return [None] * len(items)
    if len(placements) != len(items):
        raise InvalidArgument(
            f"prepare: device_placement has {len(placements)} entries for {len(items)} objects; give one for each"
        )
    return list(placements)


def _steps(run: PreparationSteps, placement: bool | None, dynamo: DynamoConfig | None) -> ModelSteps:
    """What is done to a model besides distributing it."""
    handler = run.autocast_handler or AutocastKwargs()

    def place(model: torch.nn.Module) -> torch.nn.Module:
        """A model that is sharded is where it is."""
        moves = run.device_placement and not is_sharded(model) if placement is None else placement
        return place_on(model, run.device) if moves else model

    return ModelSteps(
        place=place,
        cast=partial(
            install,
            precision=run._session.precision,
            options=autocast_options(handler),
            keeps_low_precision=not handler.outputs_in_fp32,
        ),
        compile_regions=partial(compile_prepared_regions, dynamo=dynamo),
        compile=partial(compile_prepared, dynamo=dynamo),
        dynamo=dynamo,
    )


def _dynamo(run: PreparationSteps) -> DynamoConfig | None:
    """How models that are prepared now are compiled; those in full precision then compute in TF32 where GPUs can."""
    dynamo: DynamoConfig | None = run.state.dynamo_plugin.dynamo_config()
    if dynamo is not None and run.mixed_precision == "no":
        allow_tf32(run.device.type)
    return dynamo


def evaluated(run: PreparationSteps, model: torch.nn.Module, placement: bool | None) -> torch.nn.Module:
    """The model as ``evaluation_mode`` prepares it."""
    return SingleStrategy().prepare(Bundle(models=[model]), [_steps(run, placement, _dynamo(run))]).models[0]


def autocast_options(handler: AutocastKwargs | None) -> dict[str, Any]:
    """The arguments of ``torch.autocast`` in ``handler``."""
    options = {} if handler is None else handler.to_kwargs()
    options.pop("outputs_in_fp32", None)
    return options


def _require_own_copy(run: PreparationSteps, model: torch.nn.Module) -> None:
    spread = run.use_distributed and run.verify_device_map(model)
    if spread and not env_table.BYPASS_DEVICE_MAP.get():
        raise InvalidArgument(
            f"prepare: {type(model).__name__} was spread over devices by a device_map, so the {run.num_processes} "
            f"processes cannot each have a copy; load it without device_map, or set {env_table.BYPASS_DEVICE_MAP.name}"
        )


def _require_quantized_in_memory(run: PreparationSteps, model: torch.nn.Module) -> None:
    """Refuses to train layers of 8 or 4 bits that are offloaded, or on a CPU on which bitsandbytes does not compute."""
    if not (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        return
    places = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    on_cpu = "cpu" in places and not run._bitsandbytes_computes_on_cpu()
    if on_cpu or "disk" in places:
        raise InvalidArgument(
            f"prepare: {type(model).__name__} has been loaded in 8-bit or 4-bit precision with CPU or disk offload "
            f"({', '.join(sorted(places))}), and cannot be trained that way; load the whole model onto the "
            "accelerator, or install a bitsandbytes that computes on the CPU"
        )


def _models_to_prepare(run: PreparationSteps, items: Iterable[Any]) -> dict[int, torch.nn.Module]:
    """By the ``id`` of what the user gave, the models that are not prepared, or were while they were frozen."""
    found = {}
    for item in items:
        if isinstance(item, torch.nn.Module):
            thawed = run._session.strategy.is_thawed(item)
            if thawed or not is_prepared(item):
                found[id(item)] = inside_compiler(item) if thawed else item
    for model in found.values():
        _require_own_copy(run, model)
        _require_quantized_in_memory(run, model)
    return found


def prepare_together(
    run: PreparationSteps,
    items: tuple[Any, ...],
    placements: Sequence[bool | None],
    convert_to_float8: Callable[..., Any] | None = None,
) -> list[Any]:
    """Implements ``Accelerator.prepare``: models first, so that optimizers see their final parameters, schedulers last.

    Models are converted to fp8; the strategy places, casts, compiles and distributes them, in its order, together with
    their optimizers.

    Args:
        items: what to prepare.
        placements: for each of them, whether it is moved to the device; ``None`` follows the Accelerator's choice.
        convert_to_float8: instead of torchao's conversion.

    Returns:
        The prepared objects, in the order of ``items``.
    """
    placement_of = {id(item): placement for item, placement in zip(items, placements, strict=True)}
    unique = list({id(item): item for item in items}.values())
    session, dynamo = run._session, _dynamo(run)
    if not session.config.uses_deepspeed:
        _refuse_stand_ins(unique)
    models = _models_to_prepare(run, unique)
    optimizers: list[Any] = [item for item in unique if isinstance(item, _OPTIMIZERS) and not is_prepared(item)]
    schedulers = [item for item in unique if _is_scheduler(run, item) and not is_prepared(item)]
    loaders = [item for item in unique if isinstance(item, DataLoader)]
    if session.topology.mesh.size("cp") > 1:
        for model in models.values():
            _attach_context_parallel_hooks(model)
    if models:
        steps = session.strategy.settle(run.gradient_accumulation_steps, loaders or run._dataloaders, run.split_batches)
        if steps != run.gradient_accumulation_steps:
            run.gradient_accumulation_steps = steps
    converted, stepping = convert_to_fp8(
        session.config.fp8, [*models.values()], optimizers, session.device.type, convert_to_float8
    )
    ready = session.strategy.prepare(
        Bundle(
            models=converted,
            optimizers=stepping,
            dataloaders=loaders,
            schedulers=list(schedulers),
        ),
        [_steps(run, placement_of[key], dynamo) for key in models],
    )
    if models and session.device.type == "cpu":
        return_free_memory()  # of what was copied or sharded; an earlier call may have let the process keep it
        keep_freed_memory()
    results: dict[int, Any] = dict(zip(models, ready.models, strict=True))
    run._models[:] = [results.get(id(model), model) for model in run._models]
    results |= {id(optimizer): done for optimizer, done in zip(optimizers, ready.optimizers, strict=True)}
    results |= {id(scheduler): done for scheduler, done in zip(schedulers, ready.schedulers, strict=True)}
    for last in (False, True):
        for item in unique:
            if _is_scheduler(run, item) is last:
                results[id(item)] = _prepare_one(run, results.get(id(item), item), placement_of[id(item)])
    return [results[id(item)] for item in items]


def _prepare_one(run: PreparationSteps, item: Any, placement: bool | None) -> Any:
    if isinstance(item, torch.nn.Module):
        return remember(run._models, item)
    if isinstance(item, torch.optim.Optimizer) or run._session.strategy.steps_optimizer(item):
        return run.prepare_optimizer(item, placement)
    if isinstance(item, DataLoader):
        return run._session.strategy.adapted(run.prepare_data_loader(item, placement))
    if isinstance(item, run._scheduler_types) or run._session.strategy.steps_scheduler(item):
        return run.prepare_scheduler(item)
    return item


def _is_scheduler(run: PreparationSteps, item: Any) -> bool:
    """Also a schedule of DeepSpeed's own, which is of no common class."""
    kinds = (*run._scheduler_types, DummyScheduler)
    return isinstance(item, kinds) or type(item).__module__ == _SCHEDULES_OF_DEEPSPEED


def _refuse_stand_ins(items: Iterable[Any]) -> None:
    for item in items:
        if isinstance(item, (DummyOptim, DummyScheduler)):
            raise InvalidArgument(
                f"prepare: a {type(item).__name__} stands for an entry of the configuration of DeepSpeed, but this run "
                "does not train through DeepSpeed; create an optimizer and a schedule of torch, or pass a "
                "deepspeed_plugin to Accelerator"
            )


def precision_plan(run: PreparationSteps, model: torch.nn.Module) -> PrecisionPlan:
    """Implements ``Accelerator.precision_plan``."""
    if not is_prepared(model):
        raise InvalidArgument(
            f"precision_plan: {type(model).__name__} has not been prepared; pass the model that prepare returned"
        )
    inner = run._session.strategy.unwrap(model)
    handler = run.autocast_handler or AutocastKwargs()
    stepped = [master_dtypes(wrapped.optimizer) for wrapped in run._optimizers]
    return plan_for(
        inner,
        run._session.precision,
        casts=handler.enabled and "_original_forward" in inner.__dict__,
        on_the_way=partial(run._session.strategy.dtypes_on_the_way, model),
        master_dtypes={parameter: dtype for dtypes in stepped for parameter, dtype in dtypes.items()},
    )
