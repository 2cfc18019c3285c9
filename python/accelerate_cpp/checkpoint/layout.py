"""The contents of the files of a checkpoint, with the original's names."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.containment import own_file
from accelerate_cpp.checkpoint.files import FileRecord, can_be_mapped, read_pickle
from accelerate_cpp.checkpoint.fitting import check_loader, check_model, check_optimizer, check_scaler, check_scheduler
from accelerate_cpp.checkpoint.manifest import read_manifest
from accelerate_cpp.checkpoint.memory import off_the_file
from accelerate_cpp.checkpoint.names import (
    LOADER_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_FILE,
    SHARDED_MODEL_FILE,
    SHARDED_MODEL_NAME,
    WEIGHTS_NAME,
    own_loader_name,
    random_states_name,
)
from accelerate_cpp.checkpoint.optimizer_names import Named, elsewhere_in, is_named, names_of, numbered, parameters_of
from accelerate_cpp.checkpoint.random_states import check_random_states, random_states, restore_random_states
from accelerate_cpp.checkpoint.safetensors_file import (
    place_of,
    read_safetensors,
    without_duplicates,
    write_safetensors,
)
from accelerate_cpp.checkpoint.sharded_folder import INDEX, SavedShards
from accelerate_cpp.config.text import shortened
from accelerate_cpp.data.cursor import read_ahead_from
from accelerate_cpp.devices.shards import empty_like, is_sharded_tensor, sharded_like
from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle

_log = logging.getLogger(__name__)
_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
_WRAPPED, _COMPILED = "module.", "_orig_mod."  # the latter if a part of the model is compiled


@dataclass(frozen=True)
class StateFile:
    """One file to write: its name, its content, and whether these are tensors in the safetensors format."""

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path) -> FileRecord:
        """Writes it into ``folder``, and waits until it is on the disk."""
        if self.safe:
            return write_safetensors(folder / self.name, without_duplicates(self.content))
        return write_pickle(folder / self.name, self.content)


def whole_files(models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> list[StateFile]:
    """The files of models and optimizers that were in shards and have been gathered; by names."""
    files = {SHARDED_MODEL_FILE: models, OPTIMIZER_FILE: optimizers}
    return [
        StateFile(numbered_name(name, index), state)
        for name, states in files.items()
        for index, state in enumerate(states)
    ]


def sharded_folder_name(name: str, index: int) -> str:
    """The folder of the state in shards of object ``index``."""
    return f"{name}_{index}"


def numbered_name(name: str, index: int) -> str:
    """``name`` for object 0, ``stem_1.suffix`` for object 1."""
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}_{index}.{suffix}" if index else name


def shared_files(bundle: Bundle, weights: Sequence[Mapping[str, Any]], safe_serialization: bool) -> list[StateFile]:
    """The files that one process writes for all: models, optimizers, schedulers, stateful loaders, the loss scaler."""
    model_name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    files = [
        StateFile(numbered_name(model_name, index), state, safe_serialization) for index, state in enumerate(weights)
    ]
    stateful = _stateful_loaders(bundle)
    for name, objects in (
        (OPTIMIZER_FILE, dict(enumerate(bundle.optimizers))),
        (SCHEDULER_FILE, dict(enumerate(bundle.schedulers))),
        (LOADER_FILE, stateful),
    ):
        files += [StateFile(numbered_name(name, index), one.state_dict()) for index, one in objects.items()]
    if bundle.scaler is not None:
        files.append(StateFile(SCALER_NAME, bundle.scaler.state_dict()))
    for file in files:
        _require_whole(file)
    return files


def _require_whole(file: StateFile) -> None:
    """Raises ``InvalidArgument`` if other processes hold parts of the tensors of ``file``."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # its import takes long
    sharded = tensors is not None and any(
        isinstance(leaf, tensors.DTensor) and leaf.device_mesh.size() > 1 for leaf in leaves_of(file.content)
    )
    if sharded:
        raise InvalidArgument(
            f"save_state: {file.name} would contain the shard of only one process, because its tensors are DTensors "
            "over several; use torch.distributed.checkpoint for sharded states"
        )


def _stateful_loaders(bundle: Bundle) -> dict[int, Any]:
    return {
        index: loader
        for index, loader in enumerate(bundle.dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }


def own_files(bundle: Bundle, rank: int) -> list[StateFile]:
    """The files that every process except rank 0 writes: the states of its loaders that differ from those of rank 0."""
    return [
        StateFile(numbered_name(own_loader_name(rank), index), loader.state_dict())
        for index, loader in _stateful_loaders(bundle).items()
        if rank > 0 and getattr(loader, "has_own_state", False)
    ]


_READ_AHEAD = "accelerate_cpp_read_ahead"


def random_states_file(rank: int, step: int, loaders: Sequence[Any] = ()) -> StateFile:
    """The file that every process writes: the states of its random generators, and its accumulation step.

    And of each of the ``loaders`` the states with which it read what is not out yet, if one has read ahead.
    """
    states = random_states(step)
    ahead = [list(read_ahead_from(loader)) if hasattr(loader, "progress") else [] for loader in loaders]
    if any(ahead):
        states[_READ_AHEAD] = ahead
    return StateFile(random_states_name(rank), states)


def custom_file(index: int, state: Any) -> StateFile:
    """The state of object ``index`` that the user registered."""
    return StateFile(f"custom_checkpoint_{index}.pkl", state)


@dataclass(frozen=True)
class SavedOptimizer:
    """The state of one optimizer, by numbers.

    Attributes:
        content: what the optimizer would load.
        is_mapped: whether tensors in it are mapped from the file, which nobody has read yet.
    """

    content: Any
    is_mapped: bool = False

    def restore(self, optimizer: Any) -> None:
        """Loads it into ``optimizer``, in shards where its parameters are."""
        state = in_shards(self.content, optimizer)
        if self.is_mapped and state is self.content:
            state = off_the_file(state)
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class SavedStates:
    """The states in a folder other than those of models and registered objects, read but not yet loaded into objects.

    Attributes:
        loaders: by their index among the loaders, if they have a state.
        scaler: empty if the folder has no state of a loss scaler.
        random: empty if the folder has none for this rank.
        step: micro-batches since the last forced synchronisation; ``None`` if the folder does not know.
        missing: descriptions of states that the folder lacks, and that are therefore kept.
    """

    optimizers: Sequence[SavedOptimizer]
    schedulers: Sequence[Any]
    loaders: Mapping[int, Any]
    scaler: Mapping[str, Any]
    random: Mapping[str, Any]
    step: int | None
    missing: Sequence[str] = ()


def read_states(
    folder: Path,
    bundle: Bundle,
    rank: int,
    map_location: Any = "cpu",
    load_kwargs: Mapping[str, Any] | None = None,
    models: Sequence[Sequence[tuple[str, torch.Tensor]]] = (),
) -> SavedStates:
    """Reads all files of :func:`shared_files` and :func:`random_states_file` except the models. Changes nothing.

    Args:
        models: the named parameters of each, for states of optimizers that have names.
        map_location: the device to which states of optimizers are read.
        load_kwargs: for ``torch.load`` of optimizers, schedulers and loaders.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    options = dict(load_kwargs or {})

    def numbered_states(name: str, count: int, location: Any) -> list[Any]:
        holds = f"the state of {name.split('.')[0]}"
        return [
            read_pickle(own_file(folder, numbered_name(name, index)), f"{holds} {index}", location, **options)
            for index in range(count)
        ]

    loaders = {}
    for index in _stateful_loaders(bundle):
        own, shared = (own_file(folder, numbered_name(name, index)) for name in (own_loader_name(rank), LOADER_FILE))
        if (path := own if own.is_file() else shared).is_file():
            loaders[index] = read_pickle(path, f"the state of data loader {index}", **options)
    random, step, missing = _read_random_states(folder, rank)
    scaler = _read_scaler(own_file(folder, SCALER_NAME)) if bundle.scaler is not None else {}
    if not scaler and bundle.scaler is not None and bundle.scaler.is_enabled():
        missing = [*missing, f"{SCALER_NAME} (the scale of the loss scaler starts again)"]
    return SavedStates(
        [
            read_optimizer(folder, index, optimizer, models, map_location, **options)
            for index, optimizer in enumerate(bundle.optimizers)
        ],
        numbered_states(SCHEDULER_FILE, len(bundle.schedulers), None),
        loaders,
        scaler,
        random,
        step,
        missing,
    )


def check_states(folder: Path, bundle: Bundle, states: SavedStates) -> list[str]:
    """Describes the states that will be kept, because the folder does not contain them.

    Raises:
        CheckpointError: a state does not fit the object that would load it. In that case nothing has been changed.
    """
    for index, (state, optimizer) in enumerate(zip(states.optimizers, bundle.optimizers, strict=True)):
        check_optimizer(state.content, optimizer, str(folder / numbered_name(OPTIMIZER_FILE, index)))
    for index, (state, scheduler) in enumerate(zip(states.schedulers, bundle.schedulers, strict=True)):
        check_scheduler(state, scheduler, str(folder / numbered_name(SCHEDULER_FILE, index)))
    for index, state in states.loaders.items():
        check_loader(state, bundle.dataloaders[index], str(folder / numbered_name(LOADER_FILE, index)))
    if states.scaler:
        check_scaler(states.scaler, bundle.scaler, str(folder / SCALER_NAME))
    left = check_random_states(states.random, str(folder)) if states.random else []
    _check_read_ahead(states, str(folder))
    return [*states.missing, *(f"random states {one}" for one in left)]


def read_models(folder: Path, models: Sequence[torch.nn.Module], strict: bool = True) -> list[dict[str, Any]]:
    """The states of ``models``, under their names and on the CPU. Changes nothing.

    Raises:
        CheckpointError: a file is missing, cannot be read or has other names (unless not ``strict``) or shapes.
    """
    fitted: list[Any] = []
    for index, model in enumerate(models):
        state = read_model(folder, index, model)
        fitted.append(fit_names(state, model))
        check_model(fitted[-1], model, str(_file_of_model(folder, index)), strict)
    return fitted


def restore_parts(
    bundle: Bundle,
    states: SavedStates,
    weights: Sequence[Mapping[str, Any]],
    map_location: Any = "cpu",
    restore_model: Callable[..., None] | None = None,
    **load_model_kwargs: Any,
) -> dict[str, Any]:
    """Loads states that were read and checked into ``bundle``, and the random states into their generators.

    Args:
        weights: the weights of the models.
        map_location: the device to which the models' states are moved.
        restore_model: instead of ``load_state_dict``, called with each model, its state and ``load_model_kwargs``.
        load_model_kwargs: for ``load_state_dict`` of the models.

    Returns:
        ``{"step": …}`` and, of each loader, ``{"read_ahead": [what restore_read_ahead takes, …]}``, if the checkpoint
        contains them.
    """
    if states.scaler:
        bundle.scaler.load_state_dict(states.scaler)
    for model, state in zip(bundle.models, weights, strict=True):
        placed = _placed(state, map_location, load_model_kwargs)
        if restore_model is None:
            model.load_state_dict(placed, **load_model_kwargs)
        else:
            restore_model(model, placed, **load_model_kwargs)
    for optimizer, saved in zip(bundle.optimizers, states.optimizers, strict=True):
        saved.restore(optimizer)
    for scheduler, state in zip(bundle.schedulers, states.schedulers, strict=True):
        scheduler.load_state_dict(state)
    for index, state in states.loaders.items():
        bundle.dataloaders[index].load_state_dict(state)
    if states.random:
        restore_random_states(states.random)
    steps = {} if states.step is None else {"step": states.step}
    return steps | ({"read_ahead": states.random[_READ_AHEAD]} if _READ_AHEAD in states.random else {})


def _check_read_ahead(states: SavedStates, source: str) -> None:
    """Raises ``CheckpointError`` unless there are, of each loader, states of torch's generator, or nothing at all."""
    found = states.random.get(_READ_AHEAD, [])
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise CheckpointError(f"{source}: expected a list of lists for {_READ_AHEAD!r}, found {shortened(found)}")
    for state in chain.from_iterable(found):
        check_random_states({"torch_manual_seed": state}, source)


def in_shards(state: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
    """``state`` of an optimizer, by numbers, in shards where its parameters are; then nothing of it is shared."""
    parameters = parameters_of(optimizer)
    if not any(map(is_sharded_tensor, parameters)):
        return state

    def own(parameter: torch.Tensor, value: Any) -> Any:
        shard = sharded_like(parameter, value)
        return copy.deepcopy(value) if shard is value and not is_sharded_tensor(value) else shard

    states = {
        number: {name: own(parameters[number], value) for name, value in one.items()}
        for number, one in state["state"].items()
    }
    return {**state, "state": states}


def _placed(state: Mapping[str, Any], where: Any, load_model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    placed = {name: value.to(where) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    if load_model_kwargs.get("assign"):  # separates tied weights from each other and from the file
        placed = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in placed.items()}
    return placed


def warn_of_missing(folder: Path, missing: Sequence[str]) -> None:
    """Logs one warning about states that are kept, if there are any."""
    if missing:
        _log.warning(
            "%s does not have a state for everything here; these keep their current state: %s",
            folder,
            "; ".join(missing),
        )


def read_optimizer(
    folder: Path,
    index: int,
    optimizer: Any,
    models: Sequence[Named],
    map_location: Any = "cpu",
    **load_kwargs: Any,
) -> SavedOptimizer:
    """The state of optimizer ``index``: in shards, or of ``optimizer.bin``, which is mapped if it is read to the CPU.

    Args:
        models: the named parameters of each, for states that have names.
        load_kwargs: for ``torch.load``.
    """
    shards = own_file(folder, sharded_folder_name(OPTIMIZER_NAME, index))
    path = own_file(folder, numbered_name(OPTIMIZER_FILE, index))
    if _of_the_checkpoint(folder, [shards, path]) == shards:
        return SavedOptimizer(
            read_optimizer_shards(shards, optimizer, names_of(optimizer, models), elsewhere_in(models))
        )
    is_mapped = map_location == "cpu" and can_be_mapped(path)
    options = {"mmap": True, **load_kwargs} if is_mapped else load_kwargs
    state = read_pickle(path, f"the state of optimizer {index}", map_location, **options)
    if is_named(state):
        state = numbered(state, names_of(optimizer, models), str(path), elsewhere_in(models))
    return SavedOptimizer(state, is_mapped)


def read_optimizer_shards(
    folder: Path, optimizer: Any, names: Sequence[str], elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """The state of an optimizer in the format of ``torch.distributed.checkpoint``, by numbers.

    Of parameters in shards, this process only reads its part; of those that are ``elsewhere``, nothing.
    """
    saved = SavedShards(folder, "optimizer")
    parameters: dict[str, Any] = dict(zip(names, parameters_of(optimizer), strict=True))

    def target(steps: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        parameter = parameters.get(steps[2]) if steps[1] == "state" else None
        if parameter is not None and is_sharded_tensor(parameter) and parameter.shape == shape:
            memory: torch.Tensor = empty_like(parameter, dtype, "cpu" if parameter.is_meta else parameter.device)
            return memory
        return torch.empty(shape, dtype=dtype)

    state = saved.read(target, lambda steps: steps[1] != "state" or steps[2] in parameters or steps[2] not in elsewhere)
    return numbered({"state": {}, **state}, names, str(folder), elsewhere)


def read_model(folder: Path, index: int, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """The state of model ``index`` on the CPU: in shards, or of ``pytorch_model_fsdp.bin`` or ``model.safetensors`` or
    ``pytorch_model.bin``.

    Args:
        model: of which tensors are in shards of which this process only reads its part.
    """
    path, holds = _file_of_model(folder, index), f"the weights of model {index}"
    if path.is_dir():
        return _read_model_shards(path, {} if model is None else fitted_names(model))
    if path.suffix == ".safetensors":
        return read_safetensors(path, holds)
    state = dict(_mapping_in(path, holds, **({"mmap": True} if can_be_mapped(path) else {})))
    foreign = next((name for name in state if not isinstance(name, str)), None)
    if foreign is not None:
        raise CheckpointError(
            f"{path}: expected {holds}, a dict with names, found the key {foreign!r}; this is not the state of a "
            "model: load another checkpoint"
        )
    return state


def _read_model_shards(folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    def target(steps: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        tensor: Any = own.get(_bare(".".join(map(str, steps[1:]))))
        if is_sharded_tensor(tensor) and tensor.shape == shape:
            memory: torch.Tensor = empty_like(tensor, dtype, "cpu")
            return memory
        return torch.empty(shape, dtype=dtype)

    return SavedShards(folder, "model").read(target)


def fitted_names(model: torch.nn.Module) -> dict[str, Any]:
    """The tensors of ``model`` by their names without those of wrappers."""
    return {_bare(name): value for name, value in model.state_dict().items()}


def _file_of_model(folder: Path, index: int) -> Path:
    shards = own_file(folder, sharded_folder_name(SHARDED_MODEL_NAME, index))
    names = (SHARDED_MODEL_FILE, SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
    whole, safe, pickled = (own_file(folder, numbered_name(name, index)) for name in names)
    return _of_the_checkpoint(folder, [shards, whole, safe, pickled]) or safe


def _of_the_checkpoint(folder: Path, layouts: Sequence[Path]) -> Path | None:
    """The first of these that is there, a file or a folder of shards, and in the manifest of ``folder``, if any is.

    Others in the folder may be of an earlier checkpoint, whose files no manifest named.
    """
    there = [path for path in layouts if path.is_file() or (path / INDEX).is_file()]
    manifest = read_manifest(folder) if len(there) > 1 else None
    named = set() if manifest is None else {name.partition("/")[0] for name in manifest.files}
    return next((path for path in there if path.name in named), there[0] if there else None)


def fit_names(state: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """``state`` under the names of ``model``, with the tied weights that safetensors files lack.

    Names that only differ in the prefix of a wrapper or of ``torch.compile`` are matched.
    """
    own = model.state_dict()
    fitted = dict(state)
    if fitted.keys() != own.keys():
        bare = {_bare(name): name for name in own}
        renamed = {bare.get(_bare(name), name): value for name, value in fitted.items()}
        fitted = renamed if len(renamed) == len(fitted) else fitted
    places = {place_of(own[name]): name for name in fitted if isinstance(own.get(name), torch.Tensor)}
    for name, value in own.items():
        if name not in fitted and isinstance(value, torch.Tensor) and place_of(value) in places:
            fitted[name] = fitted[places[place_of(value)]]
    return fitted


def _bare(name: str) -> str:
    name = name.replace(_COMPILED, "")
    while name.startswith(_WRAPPED):
        name = name.removeprefix(_WRAPPED)
    return name


def _read_scaler(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = read_pickle(path, "the state of the loss scaler") if path.is_file() else {}
    return state


def _read_random_states(folder: Path, rank: int) -> tuple[Mapping[str, Any], int | None, list[str]]:
    """The states for ``rank`` (empty for a new rank), the step, which is common to all ranks, and what is missing."""
    own, first = own_file(folder, random_states_name(rank)), own_file(folder, random_states_name(0))
    if own.is_file():
        states = _mapping_in(own, f"the random states of rank {rank}")
        return states, _step_in(states, own), []
    missing = [f"{own.name} is missing (the random states of rank {rank})"]
    step = _step_in(_mapping_in(first, "the random states of rank 0"), first) if first.is_file() else None
    return {}, step, missing


def _step_in(states: Mapping[str, Any], path: Path) -> int | None:
    step = states.get("step")
    if step is not None and not (type(step) is int and step >= 0):
        raise CheckpointError(f"{path}: expected a number of micro-batches for 'step', found {shortened(step)}")
    return step


def _mapping_in(path: Path, holds: str, **load_kwargs: Any) -> Mapping[str, Any]:
    states = read_pickle(path, holds, "cpu", **load_kwargs)
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path}: expected {holds}, a dict, found {type(states).__name__}")
    return states


def read_custom(folder: Path, objects: Sequence[Any]) -> list[Any]:
    """The states of the objects that the user registered. Pickles of these may run code, as in the original.

    Raises:
        CheckpointError: there are more or fewer of them, or one cannot be read.
    """
    check_custom(folder, objects)
    return [_read_custom_object(folder, one, index) for index, one in enumerate(objects)]


def load_custom_object(folder: Path, one: Any, index: int) -> None:
    """Loads the state of registered object ``index``."""
    one.load_state_dict(_read_custom_object(folder, one, index))


def _read_custom_object(folder: Path, one: Any, index: int) -> Any:
    path = own_file(folder, f"custom_checkpoint_{index}.pkl")
    return read_pickle(path, f"the state of {type(one).__name__}", "cpu", weights_only=False)


def check_custom(folder: Path, objects: Sequence[Any]) -> None:
    """Raises ``CheckpointError`` unless ``folder`` has a state for each of ``objects``, and no more."""
    found = sum(1 for path in folder.iterdir() if _CUSTOM.fullmatch(path.name))
    if found != len(objects):
        raise CheckpointError(
            f"{folder} has {found} custom checkpoints, but {len(objects)} objects are registered; register the objects "
            "that the checkpoint was saved with, in the same order, before load_state"
        )
