"""What ``prepare`` does in a run with a ``MegatronLMPlugin``, before and after it prepares as in any other run."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate_cpp.data.loaders import options_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.decoder import names_of_layers
from accelerate_cpp.prepare.megatron.datasets import MegatronLMDummyDataLoader
from accelerate_cpp.prepare.megatron.engine import MegatronEngine
from accelerate_cpp.prepare.megatron.recompute import apply_recomputation, keep_first_layers, set_dropout
from accelerate_cpp.prepare.megatron.schedule import MegatronSchedule

__all__ = ["MegatronRun"]

_logger = logging.getLogger(__name__)


class _Given(NamedTuple):
    """What is prepared, by kind."""

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    loaders: list[DataLoader[Any]]


class MegatronRun:
    """The objects of one call of ``prepare``.

    Args:
        run: the ``Accelerator``.
        items: what the program gave to ``prepare``.
        is_scheduler: whether an object is a schedule.

    Raises:
        InvalidArgument: there are several models or optimizers, or one is prepared already.
    """

    def __init__(self, run: Any, items: Sequence[Any], is_scheduler: Callable[[Any], bool]) -> None:
        self._run, self._plugin = run, run.state.megatron_lm_plugin
        self._items = self._with_loaders(items)
        self._given = _Given(
            _only(self._items, "model", lambda item: isinstance(item, torch.nn.Module)),
            _only(self._items, "optimizer", lambda item: isinstance(item, torch.optim.Optimizer)),
            _only(self._items, "schedule", is_scheduler),
            [item for item in self._items if isinstance(item, DataLoader)],
        )
        if not run.even_batches:
            raise InvalidArgument(
                "prepare: even_batches=False with megatron_lm_plugin, where processes without a batch would not take "
                "part in a step; leave it out"
            )
        if self._given.model is not None and run._engine is not None:
            raise InvalidArgument(
                "prepare: a second model with megatron_lm_plugin; an engine trains one model. Prepare the other one "
                "with evaluation_mode=True, or train without the plugin"
            )

    def arranged(self) -> list[Any]:
        """The objects as they are prepared: loaders of whole steps, the model and its optimizer as the plugin says.

        Schedules are left out as ``None``: they are made, or step, once the rest is prepared.
        """
        given, plugin = self._given, self._plugin
        size = self._micro_batch_size()
        if size is not None:
            plugin.set_training_args(size, self._run._session.topology.mesh.data_size)
        replaced: dict[int, Any] = {id(given.scheduler): None} if given.scheduler is not None else {}
        if given.model is not None:
            model, optimizer = self._model_and_optimizer(given.model, given.optimizer)
            replaced |= {id(given.model): model, id(given.optimizer): optimizer}
        rows = None if size is None else size * int(plugin.num_micro_batches or 1)
        replaced |= {id(loader): _with_batches_of(loader, rows) for loader in given.loaders if rows is not None}
        return [replaced.get(id(item), item) for item in self._items]

    def finished(self, prepared: Sequence[Any]) -> tuple[list[Any], Any]:
        """The prepared objects, in the order of ``items``, with the engine in place of the model.

        Returns:
            The objects, and the schedule that the engine steps; ``None`` without one.
        """
        given, engine = self._given, self._run._engine
        by_id = {id(item): done for item, done in zip(self._items, prepared, strict=True)}
        optimizer = by_id.get(id(given.optimizer), None if engine is None else engine.optimizer)
        schedule = self._schedule(optimizer)
        if given.scheduler is not None and given.model is None:
            if engine is None or schedule is None:
                raise InvalidArgument(
                    f"prepare: a {type(given.scheduler).__name__} without its model and optimizer, which an engine "
                    "steps together with it; pass them to the same prepare"
                )
            engine.scheduler = schedule
        if given.scheduler is not None:
            by_id[id(given.scheduler)] = schedule
        if given.model is not None:
            model = by_id[id(given.model)]
            inner = self._run._session.strategy.unwrap(model)
            keep_first_layers(getattr(inner, "stage_modules", [inner]), self._plugin)
            by_id[id(given.model)] = MegatronEngine(self._run, model, optimizer, schedule)
        return [by_id[id(item)] for item in self._items], schedule

    def _with_loaders(self, items: Sequence[Any]) -> list[Any]:
        """``items`` with the loaders of training, validation and test data in place of what stands for them."""
        loaders: list[Any] | None = None
        found = []
        for item in items:
            if isinstance(item, MegatronLMDummyDataLoader):
                if loaders is None:
                    item.set_megatron_data_args()
                    loaders = list(item.build_train_valid_test_data_iterators(self._run))
                if not loaders:
                    raise InvalidArgument(
                        "prepare: a MegatronLMDummyDataLoader was passed more than three times; it stands for "
                        "training, validation and test data, in this order"
                    )
                item = loaders.pop(0)
            found.append(item)
        return found

    # The model

    def _model_and_optimizer(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        plugin = self._plugin
        if plugin.custom_model_provider_function is not None:
            made = self._made_by_program()
            optimizer = None if optimizer is None else _over(optimizer, model, made)
            model = made
        elif plugin.custom_prepare_model_function is not None:
            raise InvalidArgument(
                "MegatronLMPlugin: custom_prepare_model_function without custom_model_provider_function, which it is "
                "called with; pass both"
            )
        try:
            plugin.set_network_size_args(model, self._first_sample())
        except InvalidArgument:
            if plugin.custom_train_step_class is None:
                raise  # a train step of the program's own may know what nobody else does
        found = getattr(getattr(model, "config", None), "eos_token_id", None)
        if "eos_token_id" not in (plugin.other_megatron_args or {}):
            end = found[0] if isinstance(found, (list, tuple)) else found
            plugin.megatron_lm_default_args["eos_token_id"] = end
        set_dropout(model, float(plugin.attention_dropout or 0), float(plugin.hidden_dropout or 0))
        apply_recomputation(model, plugin)
        self._arrange_stages(model)
        if optimizer is not None:
            name = type(optimizer).__name__.lower()
            if "adam" in name or "sgd" in name:
                plugin.set_optimizer_type(optimizer)
            _divide_groups(optimizer, model, plugin)
        return model, optimizer

    def _made_by_program(self) -> torch.nn.Module:
        provider, prepare = (
            self._plugin.custom_model_provider_function,
            self._plugin.custom_prepare_model_function,
        )
        made = provider() if prepare is None else prepare(provider)
        model = made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgument(
                f"MegatronLMPlugin: custom_model_provider_function returned a {type(made).__name__}; expected a "
                "torch.nn.Module, or a list of one"
            )
        return model

    def _first_sample(self) -> Mapping[str, Any] | None:
        """A batch of one sample, which tells the length of sequences; no sampler is asked for it."""
        for loader in self._given.loaders:
            if not isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
                with torch.random.fork_rng(devices=[]):
                    batch = loader.collate_fn([loader.dataset[0]])
                return batch if isinstance(batch, Mapping) and "input_ids" in batch else None
        return None

    def _arrange_stages(self, model: torch.nn.Module) -> None:
        """The stages of the pipeline, where the plugin counts their layers."""
        config, plugin = self._run.parallelism_config, self._plugin
        if config is None or not config.pp_enabled:
            return
        ranks, each = config.pp_size, plugin.num_layers_per_virtual_pipeline_stage
        last = plugin.decoder_last_pipeline_num_layers
        layers = names_of_layers(model) if each is not None or last is not None else []
        if each is not None:
            stages, rest = divmod(len(layers), each * ranks)
            if rest or stages < 2:
                raise InvalidArgument(
                    f"MegatronLMPlugin: num_layers_per_virtual_pipeline_stage={each} with {len(layers)} layers on "
                    f"pp_degree={ranks}; expected a number that gives each process two or more stages of equal length"
                )
            config.pp_handler.stages_per_process = stages
            config.pp_handler.split_points = layers[each::each]
        elif last is not None:
            if not 0 < last < len(layers) - ranks + 2:
                raise InvalidArgument(
                    f"MegatronLMPlugin: decoder_last_pipeline_num_layers={last} of {len(layers)} layers on "
                    f"pp_degree={ranks}; expected 1 to {len(layers) - ranks + 1}"
                )
            others = len(layers) - last
            begins = [stage * others // (ranks - 1) for stage in range(1, ranks)]
            config.pp_handler.split_points = [layers[begin] for begin in begins]

    # Loaders and schedules

    def _micro_batch_size(self) -> int | None:
        """Rows of a micro-batch: the batch size of the loaders, the smallest or the largest of several."""
        sizes = [
            size
            for loader in self._given.loaders
            if (size := getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None))
        ]
        if not sizes:
            return None
        chosen = int(min(sizes) if self._plugin.is_train_batch_min else max(sizes))
        if len(set(sizes)) > 1:
            _logger.info(
                "loaders have batches of %s rows; is_train_batch_min=%s of the MegatronLMPlugin makes micro-batches "
                "of %d",
                " and ".join(map(str, sizes)),
                self._plugin.is_train_batch_min,
                chosen,
            )
        return chosen

    def _schedule(self, optimizer: Any) -> Any:
        """That of Megatron-LM in place of its stand-in, or if the plugin has a length; else the program's own."""
        scheduler, plugin = self._given.scheduler, self._plugin
        if scheduler is not None and not hasattr(scheduler, "total_num_steps"):
            divided = plugin.no_wd_decay_cond is not None or plugin.scale_lr_cond is not None
            if divided or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise InvalidArgument(
                    f"prepare: a {type(scheduler).__name__} with megatron_lm_plugin, whose engine steps it without "
                    "metrics, and divides parameter groups where it has conditions; pass a MegatronLMDummyScheduler"
                )
            return scheduler
        if optimizer is None or (scheduler is None and not (plugin.train_iters or plugin.train_samples)):
            return None
        if scheduler is not None:
            plugin.set_scheduler_args(scheduler)
        return MegatronSchedule(optimizer, plugin, int(getattr(plugin, "global_batch_size", 1)))


def _only(items: Sequence[Any], kind: str, belongs: Callable[[Any], bool]) -> Any:
    found = list({id(item): item for item in items if belongs(item)}.values())
    if len(found) > 1:
        raise InvalidArgument(
            f"prepare: {len(found)} objects of the kind {kind} with megatron_lm_plugin, whose engine trains one model "
            "with one optimizer and one schedule; pass one of each"
        )
    return found[0] if found else None


def _with_batches_of(loader: DataLoader[Any], rows: int) -> DataLoader[Any]:
    """A loader like this one with batches of ``rows``."""
    sampler = loader.batch_sampler
    if sampler is not None and (loader.batch_size is None or type(sampler) is not BatchSampler):
        if not hasattr(sampler, "batch_size"):
            return loader
        copied: Any = copy.copy(sampler)
        copied.batch_size = rows
        return DataLoader(loader.dataset, batch_sampler=copied, **options_of(loader))
    if loader.batch_size in (rows, None):
        return loader
    kept: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(loader.dataset, batch_size=rows, drop_last=loader.drop_last, **kept, **options_of(loader))


def _over(optimizer: torch.optim.Optimizer, model: torch.nn.Module, made: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer like this one of ``model`` over the parameters of ``made``, in the groups of equal names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    others = dict(made.named_parameters())
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [names.get(id(parameter), "") for parameter in group["params"]]
        options = {name: value for name, value in group.items() if name in optimizer.defaults}
        groups.append({**options, "params": [others.pop(name) for name in own if name in others]})
    if others:
        if len(groups) > 1:
            warnings.warn(
                f"prepare: {len(others)} parameters of the model of custom_model_provider_function are in no group of "
                f"the optimizer by their names, such as {next(iter(others))!r}; they join its first group",
                stacklevel=5,
            )
        groups[0]["params"] += others.values()
    taken = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    kept = [{name: value for name, value in group.items() if name == "params" or name in taken} for group in groups]
    return type(optimizer)([group for group in kept if group["params"]], **defaults)


def _divide_groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module, plugin: Any) -> None:
    """Groups without weight decay, and with another rate, for parameters that the plugin's conditions name."""
    without_decay, scaled = plugin.no_wd_decay_cond, plugin.scale_lr_cond
    if without_decay is None and scaled is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def divided(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kinds: dict[tuple[bool, bool], list[torch.Tensor]] = {}
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            kind = (
                without_decay is not None and bool(without_decay(name, parameter)),
                scaled is not None and bool(scaled(name, parameter)),
            )
            kinds.setdefault(kind, []).append(parameter)
        for (no_decay, is_scaled), parameters in kinds.items():
            changed = dict(group, params=parameters)
            if no_decay:
                changed["weight_decay"] = 0.0
            if is_scaled:
                changed["lr"] = group["lr"] * plugin.lr_mult
            yield changed

    optimizer.param_groups[:] = [one for group in optimizer.param_groups for one in divided(group)]
