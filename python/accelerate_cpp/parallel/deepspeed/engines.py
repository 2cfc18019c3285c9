"""Making an engine of DeepSpeed from a model, its optimizer and its schedule, and what is asked of it afterwards."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from accelerate_cpp.config.session_config import DynamoConfig
from accelerate_cpp.parallel.deepspeed.optimizers import cpu_form_of
from accelerate_cpp.parallel.deepspeed.regions import compile_regions_deepspeed
from accelerate_cpp.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler

__all__ = [
    "Made",
    "compile_engine",
    "depends_on",
    "for_evaluation",
    "keep_norm",
    "let_gradients_through",
    "make_engine",
    "mark_outputs",
    "members_of",
    "passed",
]

_MARK = "accelerate_cpp.engine"


@dataclass(frozen=True)
class Made:
    """An engine, and what stands for the optimizer and the schedule that it was made with, which may be ``None``."""

    engine: Any
    optimizer: Any
    scheduler: Any


def make_engine(
    library: Any, config: dict[str, Any], model: torch.nn.Module, optimizer: Any, scheduler: Any, **options: Any
) -> Made:
    """An engine of ``model``.

    Args:
        library: DeepSpeed.
        config: without ``"auto"``; changed where the optimizer has no form for offloaded states.
        optimizer: of torch, a :class:`DummyOptim`, or ``None``.
        scheduler: of torch or DeepSpeed, a :class:`DummyScheduler`, or ``None``.
        options: of ``deepspeed.initialize``.
    """
    given: dict[str, Any] = {"model": model, "config": config, "dist_init_required": False, **options}
    if isinstance(optimizer, DummyOptim):
        given["model_parameters"] = list(optimizer.params)
    elif optimizer is not None:
        given["optimizer"] = _offloaded(config, optimizer)
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            given["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None and not isinstance(scheduler, LRScheduler):
        given["lr_scheduler"] = scheduler  # one of its own, which it steps
    initialize = library.initialize
    if config.get("msamp", {}).get("enabled"):
        initialize = importlib.import_module("msamp.deepspeed").initialize
    engine, stepping, _, scheduled = initialize(**given)
    return Made(engine, stepping, scheduled)


def _offloaded(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer``, or where its states are kept on the host or on disks the form of it that steps there."""
    place = (config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none")
    if place in (None, "none") or not config.get("zero_force_ds_cpu_optimizer", True):
        return optimizer
    if type(optimizer).__module__.startswith("deepspeed."):
        return optimizer
    made = cpu_form_of(optimizer)
    if made is None:
        config["zero_force_ds_cpu_optimizer"] = False
        warnings.warn(
            f"DeepSpeed has no form of {type(optimizer).__name__} with these options for states that are offloaded to "
            f"{place!r}: the optimizer itself steps there, which takes longer; AdamW and Adam without amsgrad have one",
            stacklevel=6,
        )
        return optimizer
    return made


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the engine of a model that is not trained."""
    return {name: copy.deepcopy(value) for name, value in config.items() if name not in ("optimizer", "scheduler")}


def let_gradients_through(engine: Any) -> None:
    """Lets a model that is not trained judge one that is: DeepSpeed would prepare its optimizer, which it has not."""
    engine._backward_prologue = lambda: None


def compile_engine(engine: Any, dynamo: DynamoConfig | None) -> None:
    """Compiles the module of ``engine`` in place, as a whole or block by block, if that is asked for."""
    if dynamo is None:
        return
    options = dict(dynamo.options)
    if dynamo.by_region:
        compile_regions_deepspeed(engine.module, **options)
    else:
        engine.compile(backend=options.pop("backend"), compile_kwargs=options)


def keep_norm(engine: Any, norms: MutableMapping[Any, Any]) -> None:
    """Keeps in ``norms`` those of the gradients that ``engine`` clips itself, in fp32 without ZeRO, and forgets."""

    def clip() -> None:
        parameters = [one for one in engine.module.parameters() if one.grad is not None]
        norms[engine] = torch.nn.utils.clip_grad_norm_(parameters, engine.gradient_clipping())

    if engine.optimizer is engine.basic_optimizer and engine.mpu is None:
        engine.clip_fp32_gradients = clip


def members_of(optimizer: Any, models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of ``models`` that have parameters which ``optimizer`` steps."""
    if isinstance(optimizer, DummyOptim):
        optimizer.params = list(optimizer.params)  # a generator could be read once
        entries = optimizer.params
    else:
        entries = optimizer.param_groups
    stepped = {id(one) for entry in entries for one in _parameters_in(entry)}
    return [model for model in models if any(id(parameter) in stepped for parameter in model.parameters())]


def _parameters_in(entry: Any) -> Iterator[Any]:
    """The parameters of a group, or of one entry of a list of parameters with or without names."""
    if isinstance(entry, dict):
        yield from entry["params"]
    elif isinstance(entry, tuple):
        yield entry[1]
    else:
        yield entry


def mark_outputs(engine: Any) -> None:
    """Lets :func:`depends_on` know what ``engine`` has computed, also where activations are computed again.

    What a model computes while all of its parameters are frozen, as that which judges another one, gives it no
    gradients.
    """

    def mark(module: Any, _: Any, output: Any) -> None:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        for one in tree_leaves(output) if trains else ():
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                node: Any = one.grad_fn
                node.metadata[_MARK] = id(module)

    engine.register_forward_hook(mark)


@contextmanager
def passed(engines: Sequence[Any]) -> Iterator[None]:
    """A block in which gradients may flow through ``engines`` though another one's backward has been called.

    In stage 0 of ZeRO, and where nothing is trained, they would take it for a ``loss.backward()`` of the program.
    """
    before = [engine._running_engine_backward for engine in engines]
    for engine in engines:
        engine._running_engine_backward = True
    try:
        yield
    finally:
        for engine, running in zip(engines, before, strict=True):
            engine._running_engine_backward = running


def depends_on(loss: torch.Tensor, engines: Sequence[Any]) -> list[Any]:
    """Those of ``engines`` whose parameters or outputs are in the graph of ``loss``."""
    owners = {id(parameter): id(engine) for engine in engines for parameter in engine.module.parameters()}
    found: set[int] = set()
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(node.metadata.get(_MARK, 0))
        found.add(owners.get(id(getattr(node, "variable", None)), 0))
        left += [following for following, _ in node.next_functions]
    return [engine for engine in engines if id(engine) in found]
