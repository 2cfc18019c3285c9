"""Saving and loading the state of a run: models, optimizers, schedulers, loaders, generators and registered objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.checkpoint.files import replacing
from accelerate_cpp.checkpoint.finding import common_numbers, target_of
from accelerate_cpp.checkpoint.layout import (
    check_states,
    custom_file,
    load_custom_object,
    own_files,
    random_states_file,
    read_models,
    read_states,
    restore_parts,
    shared_files,
    warn_of_missing,
)
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.shards import save_in_shards
from accelerate_cpp.config import env_table
from accelerate_cpp.data.cursor import Cursor, check_cursor, cursor_of, restore_cursor, restore_read_ahead
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.placement.offloaded_modules import get_state_dict_offloaded_model, has_offloaded_params
from accelerate_cpp.precision.grad_scaler import settle
from accelerate_cpp.state import PartialState
from accelerate_cpp.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accelerate_cpp.utils.other import extract_model_from_parallel, saves_here

if TYPE_CHECKING:
    from accelerate_cpp.prepare.private_steps import PreparationSteps

__all__ = ["load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"]

__getattr__ = lending("checkpointing")


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Writes the files of this process directly into ``output_dir``; ``Accelerator.save_state`` does it in one step.

    Args:
        model_states: a state dict for each model.
        process_index: the rank, for the name of the file of random states.
        step: micro-batches since the last forced synchronisation.
        save_on_each_node: rank 0 of each host writes the shared files, instead of only rank 0 of the whole run.
        safe_serialization: models in the safetensors format instead of pickles.

    Returns:
        ``output_dir`` as a path.
    """
    folder = Path(output_dir)
    bundle = Bundle([], list(optimizers), list(dataloaders), list(schedulers), scaler)
    files = shared_files(bundle, model_states, safe_serialization) if saves_here(save_on_each_node) else []
    for file in [
        *files,
        *own_files(bundle, process_index),
        random_states_file(process_index, step, bundle.dataloaders),
    ]:
        with replacing(folder / file.name) as waiting:
            replace(file, name=waiting.name).write(folder)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Loads what :func:`save_accelerator_state` of this package or of the original wrote.

    Args:
        map_location: ``"cpu"`` (also the meaning of ``None``) or ``"on_device"``.
        load_kwargs: for ``torch.load`` of optimizers, schedulers and loaders.
        load_model_func_kwargs: for ``load_state_dict`` of the models.

    Returns:
        ``{"step": …}``, if the files contain it.

    Raises:
        TypeError: ``map_location`` is something else.
        CheckpointError: a file is missing, cannot be read or does not fit; in that case nothing has been changed.
    """
    inner = [extract_model_from_parallel(model) for model in models]
    bundle = Bundle(inner, list(optimizers), list(dataloaders), list(schedulers), scaler)
    where = _device_of(map_location)
    folder = Path(input_dir)
    states = read_states(
        folder, bundle, process_index, where, load_kwargs, [list(model.named_parameters()) for model in inner]
    )
    missing = check_states(folder, bundle, states)
    weights = read_models(folder, inner, bool(load_model_func_kwargs.get("strict", True)))
    warn_of_missing(folder, missing)
    found = restore_parts(bundle, states, weights, where, **load_model_func_kwargs)
    _restore_read_ahead(dataloaders, found.pop("read_ahead", ()))
    return found


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Writes ``obj.state_dict()`` to ``custom_checkpoint_<index>.pkl`` in ``path``, on the main process."""
    if saves_here(save_on_each_node):
        custom_file(index, obj.state_dict()).write(Path(path))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Loads ``custom_checkpoint_<index>.pkl`` in ``path`` into ``obj``. It may run code: only load trusted files."""
    load_custom_object(Path(path), obj, index)


def check_target(accelerator: PreparationSteps, output_dir: str | os.PathLike[str] | None) -> None:
    """``InvalidArgument`` if :func:`save_state` could not save to ``output_dir`` now."""
    target_of(accelerator.project_configuration, output_dir)


def save_state(
    accelerator: PreparationSteps,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    blocking: bool,
    save_model_func_kwargs: Mapping[str, Any],
) -> Path:
    """:meth:`Accelerator.save_state`."""
    settle(accelerator.scaler)
    return accelerator._checkpoints.save(
        output_dir,
        accelerator.project_configuration,
        _participants(accelerator),
        _bundle(accelerator, "no_save_optim"),
        accelerator._session.strategy,
        accelerator.step,
        lambda: [cursor_of(loader) for loader in accelerator._dataloaders],
        safe_serialization,
        blocking,
        save_model_func_kwargs,
    )


def load_state(
    accelerator: PreparationSteps,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: Mapping[str, Any] | None,
    load_model_func_kwargs: dict[str, Any],
) -> None:
    """:meth:`Accelerator.load_state`."""
    options = dict(load_model_func_kwargs)
    # Of states in shards, the whole need not fit on the device.
    whole = accelerator._session.strategy.layout == "plain"
    on_device = accelerator.use_distributed and accelerator.device.type != "cpu" and whole
    where = _device_of(options.pop("map_location", None) or ("on_device" if on_device else "cpu"))
    states, cursors = accelerator._checkpoints.load(
        input_dir,
        accelerator.project_configuration,
        _participants(accelerator),
        _bundle(accelerator, "no_load_optim"),
        accelerator._session.strategy,
        lambda cursors: _check_cursors(accelerator, cursors),
        where,
        load_kwargs,
        **options,
    )
    # A run that may go on with another number of processes may accumulate another number of micro-batches.
    accelerator.step = 0 if env_table.FULL_WORLD_SIZE.get() is not None else states.get("step", accelerator.step)
    for loader, cursor in _with_loaders(accelerator, cursors):
        restore_cursor(loader, cursor)
    _restore_read_ahead(accelerator._dataloaders, states.get("read_ahead", ()))


def _restore_read_ahead(loaders: Sequence[Any], states: Sequence[list[torch.Tensor]]) -> None:
    for loader, ahead in zip(loaders, states):  # noqa: B905 - a program may read other data now
        if hasattr(loader, "progress"):
            restore_read_ahead(loader, ahead)


def _with_loaders(accelerator: PreparationSteps, cursors: list[Cursor]) -> Iterator[tuple[Any, Cursor]]:
    return zip(accelerator._dataloaders, cursors)  # noqa: B905 - a program may read other data now


def _check_cursors(accelerator: PreparationSteps, cursors: list[Cursor]) -> None:
    for loader, cursor in _with_loaders(accelerator, cursors):
        check_cursor(loader, cursor)


def resume(accelerator: PreparationSteps) -> bool:
    """:meth:`Accelerator.resume`."""
    accelerator._checkpoints.wait()
    ranks = _participants(accelerator).those_in("resume")
    if not common_numbers(accelerator.project_configuration, ranks):
        accelerator._checkpoints.are_of_all = not ranks.alone
        return False
    accelerator.load_state()
    return True


def save_model(
    accelerator: PreparationSteps,
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """:meth:`Accelerator.save_model`."""
    folder = Path(save_directory)
    if folder.is_file():
        raise InvalidArgument(f"save_model: {folder} is a file; expected a folder, or a name for a new one")
    writes = saves_here(accelerator.project_configuration.save_on_each_node)
    if any(map(has_offloaded_params, model.modules())):
        state = get_state_dict_offloaded_model(model)
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RuntimeError("save_model: some parameters are on the meta device and have no values; materialise them")
    else:
        strategy = accelerator._session.strategy
        in_shards = strategy.in_shards(model)
        state = strategy.model_state(model, here=writes) if in_shards else accelerator.get_state_dict(model)
    if writes:
        save_in_shards(state, folder, max_shard_size, safe_serialization)


def _device_of(map_location: str | None) -> str | torch.device:
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r}: expected None, 'cpu' or 'on_device'")
    return PartialState().device if map_location == "on_device" else "cpu"


def _participants(accelerator: PreparationSteps) -> Participants:
    return Participants(accelerator._session.topology, meeting=accelerator._session.meeting)


def _bundle(accelerator: PreparationSteps, without_optimizers: str) -> Bundle:
    """What is saved; of optimizers and schedules that an engine of DeepSpeed steps, it saves the states itself.

    Args:
        without_optimizers: the field of a ``MegatronLMPlugin`` that leaves them out.
    """
    prepared = accelerator._prepared
    plugin = accelerator._session.config.megatron_plugin
    with_optimizers = plugin is None or not getattr(plugin, without_optimizers)
    return replace(
        prepared,
        optimizers=[
            one for one in prepared.optimizers if with_optimizers and not isinstance(one, DeepSpeedOptimizerWrapper)
        ],
        schedulers=[one for one in prepared.schedulers if not isinstance(one, DeepSpeedSchedulerWrapper)],
        scaler=accelerator.scaler,
    )
