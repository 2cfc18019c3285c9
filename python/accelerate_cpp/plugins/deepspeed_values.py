"""Values for the entries of DeepSpeed's configuration that say ``"auto"``, and what contradicts the others.

The original fills the same entries with the same values; where the configuration and the program say different things,
it uses one of them silently, where this warns.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig
from accelerate_cpp.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler

__all__ = ["RunOfDeepSpeed", "configuration_for", "settle_accumulation", "settle_batch_sizes"]

_CLIPPING = 1.0  # of an "auto", as in the original
_MICRO_BATCH, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_FROM_HIDDEN_SIZE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class RunOfDeepSpeed:
    """What the configuration has to know of a run.

    Attributes:
        num_processes: all of them.
        replicas: the processes, or groups of such that split sequences, whose samples DeepSpeed counts. It also counts
            those whose layers it splits, which have the same samples.
        split_batches: whether a batch of a loader is divided among the processes.
    """

    num_processes: int
    replicas: int
    split_batches: bool


def settle_accumulation(plugin: DeepSpeedPlugin, steps: int) -> int:
    """The micro-batches per step: of the configuration, if it says how many, else ``steps``, which is filled in."""
    config = plugin.deepspeed_config
    said = config.get(_ACCUMULATION, "auto")
    if said == "auto" or (said == 1 and plugin.leaves_accumulation_open):
        said = config[_ACCUMULATION] = steps
    if said != steps and steps != 1:
        _warn(_ACCUMULATION, said, f"the Accelerator has {steps}")
    return int(said)


def settle_batch_sizes(plugin: DeepSpeedPlugin, loaders: Sequence[Any], run: RunOfDeepSpeed) -> None:
    """Fills in the sizes of a micro-batch of a process and of a step, from the batches of ``loaders``.

    DeepSpeed counts samples with them; gradients do not depend on them.

    Raises:
        InvalidArgument: the configuration says sizes of which one is not the product of the others.
    """
    config = plugin.deepspeed_config
    own, said, total = (
        _batch_size(plugin, loaders, run),
        config.get(_MICRO_BATCH, "auto"),
        config.get("train_batch_size", "auto"),
    )
    accumulation = config[_ACCUMULATION]
    if said == "auto" and total != "auto":
        if total % (accumulation * run.replicas):
            raise InvalidArgument(
                f"the configuration of DeepSpeed has train_batch_size={total}, which is not divisible by "
                f"{_ACCUMULATION}={accumulation} × {run.replicas} processes; make it 'auto', or a multiple of "
                f"{accumulation * run.replicas}"
            )
        said = total // (accumulation * run.replicas)
    if said == "auto":
        if own is None:
            warnings.warn(
                f"{_MICRO_BATCH} is 'auto' in the configuration of DeepSpeed, but no loader with a batch size has been "
                "given to prepare: 1 is used, so DeepSpeed's counts of samples are wrong, and nothing else; pass the "
                "loader to the same prepare, or write the size into the configuration",
                stacklevel=4,
            )
        said = own or 1
    elif own is not None and own != said:
        _warn(
            _MICRO_BATCH,
            said,
            f"the loader's batches have {own} samples per process",
            "for DeepSpeed's counts of samples",
        )
    expected = said * accumulation * run.replicas
    if total not in ("auto", expected):
        raise InvalidArgument(
            f"the configuration of DeepSpeed has train_batch_size={total}, but {_MICRO_BATCH}={said} × "
            f"{_ACCUMULATION}={accumulation} × {run.replicas} processes is {expected}; make one of them 'auto'"
        )
    config[_MICRO_BATCH], config["train_batch_size"] = said, expected


def _batch_size(plugin: DeepSpeedPlugin, loaders: Sequence[Any], run: RunOfDeepSpeed) -> int | None:
    """The samples of one process in a batch: of the smallest batches, unless the plugin wants the largest."""
    sizes = [size for size in (getattr(loader, "batch_size", None) for loader in loaders) if size is not None]
    if not sizes:
        return None
    chosen = min(sizes) if plugin.is_train_batch_min else max(sizes)
    return max(1, chosen // run.num_processes) if run.split_batches else int(chosen)


def configuration_for(
    plugin: DeepSpeedPlugin,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | DummyOptim | None,
    scheduler: Any,
    run: RunOfDeepSpeed,
) -> dict[str, Any]:
    """The configuration of the engine of ``model``, without ``"auto"``, in which sizes have been settled.

    Raises:
        InvalidArgument: an entry is ``"auto"`` and nothing says its value; or the configuration describes an optimizer
            or a schedule and the program brings another one, or neither does.
    """
    filled = HfDeepSpeedConfig(plugin.deepspeed_config)
    _require_one_optimizer(filled.config, optimizer, scheduler)
    values: dict[str, Any] = {
        "gradient_clipping": _CLIPPING,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **_sizes(filled, model),
    }
    said: dict[str, Any] = {}
    if isinstance(optimizer, DummyOptim):
        values |= {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}
        said |= {"optimizer.params.lr": optimizer.lr} if optimizer.lr != 0.001 else {}
        said |= {"optimizer.params.weight_decay": optimizer.weight_decay} if optimizer.weight_decay else {}
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        of_schedule = _values_of_schedule(scheduler, run)
        values |= of_schedule
        given = {"total_num_steps": scheduler.total_num_steps, "warmup_num_steps": scheduler.warmup_num_steps}
        said |= {
            f"scheduler.params.{name}": of_schedule[f"scheduler.params.{name}"] for name, one in given.items() if one
        }
    for name, asked in said.items():
        held = filled.get_value(name, "auto")
        if held not in ("auto", asked):
            _warn(name, held, f"the program says {asked}")
    _fill(filled.config, "", values)
    if isinstance(optimizer, torch.optim.Optimizer):
        filled.config["zero_allow_untested_optimizer"] = True
    return filled.config


def _values_of_schedule(scheduler: DummyScheduler, run: RunOfDeepSpeed) -> dict[str, Any]:
    defaults = getattr(scheduler.optimizer, "defaults", None)
    rate = getattr(scheduler.optimizer, "lr", None) if defaults is None else defaults["lr"]
    values: dict[str, Any] = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed refuses 0
    }
    total = scheduler.total_num_steps
    if total is not None:
        steps = total if run.split_batches else math.ceil(total / run.num_processes)
        values["scheduler.params.total_num_steps"] = steps
    return values


def _require_one_optimizer(config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    """Raises ``InvalidArgument`` unless the program and the configuration complete each other."""
    stands_in = isinstance(optimizer, DummyOptim)
    if optimizer is not None and stands_in is not ("optimizer" in config):
        raise InvalidArgument(
            "the program has a DummyOptim, which stands for the entry 'optimizer' of the configuration of DeepSpeed, "
            "but there is none: add it, or create an optimizer of torch"
            if stands_in
            else f"the configuration of DeepSpeed has an entry 'optimizer', and the program has another one "
            f"({type(optimizer).__name__}); remove that entry, or create accelerate_cpp.utils.DummyOptim in the program"
        )
    if scheduler is None:
        return
    if not isinstance(scheduler, DummyScheduler):
        if "scheduler" in config:
            raise InvalidArgument(
                f"the configuration of DeepSpeed has an entry 'scheduler', and the program has another one "
                f"({type(scheduler).__name__}); remove that entry, or create accelerate_cpp.utils.DummyScheduler in "
                "the program"
            )
        if stands_in:
            raise InvalidArgument(
                f"a {type(scheduler).__name__} needs the optimizer that it changes, but the program has a DummyOptim; "
                "create accelerate_cpp.utils.DummyScheduler, with lr_scheduler_callable if it is not in the "
                "configuration"
            )
    elif "scheduler" not in config and scheduler.lr_scheduler_callable is None:
        raise InvalidArgument(
            "the program has a DummyScheduler, which stands for the entry 'scheduler' of the configuration of "
            "DeepSpeed, but there is none: add it, or pass lr_scheduler_callable"
        )


def _sizes(config: HfDeepSpeedConfig, model: torch.nn.Module) -> dict[str, int]:
    """The sizes of buckets that are ``"auto"``, from the width of a model of transformers."""
    wanted = [name for name in _FROM_HIDDEN_SIZE if config.get_value(name) == "auto"]
    if not wanted:
        return {}
    own: Any = getattr(model, "config", None)
    own = own.get_text_config() if hasattr(own, "get_text_config") and not hasattr(own, "hidden_size") else own
    width = getattr(own, "hidden_size", None) or max(getattr(own, "hidden_sizes", None) or [0])
    if not width:
        raise InvalidArgument(
            f"the configuration of DeepSpeed has 'auto' for {', '.join(wanted)}, which follow from hidden_size or "
            f"hidden_sizes of model.config, but {type(model).__name__} has neither; write numbers there"
        )
    sizes = (width * width, int(0.9 * width * width), 10 * width)
    return dict(zip(_FROM_HIDDEN_SIZE, sizes, strict=True))


def _fill(node: dict[str, Any], prefix: str, values: Mapping[str, Any]) -> None:
    for name, value in node.items():
        if isinstance(value, dict):
            _fill(value, f"{prefix}{name}.", values)
        elif value == "auto":
            if values.get(f"{prefix}{name}") is None:
                raise InvalidArgument(
                    f"the configuration of DeepSpeed has {prefix}{name}='auto', but nothing in the program says its "
                    "value; write one there"
                )
            node[name] = copy.copy(values[f"{prefix}{name}"])


def _warn(name: str, held: Any, other: str, purpose: str = "") -> None:
    use = f"the configuration's is used {purpose}".rstrip()
    warnings.warn(f"{name} is {held} in the configuration of DeepSpeed, and {other}: {use}", stacklevel=5)
