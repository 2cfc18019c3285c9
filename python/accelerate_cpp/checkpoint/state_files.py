"""Which file of a checkpoint holds what: the original's names and contents."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.checkpoint.files import FileRecord, read_pickle, write_pickle
from accelerate_cpp.checkpoint.random_states import random_states, restore_random_states
from accelerate_cpp.checkpoint.safetensors_file import (
    place_of,
    read_safetensors,
    without_duplicates,
    write_safetensors,
)
from accelerate_cpp.errors import CheckpointError

_log = logging.getLogger(__name__)
_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class StateFile:
    """One file to write: its name, what it holds, and whether that is tensors in the safetensors format."""

    name: str
    content: Any
    safe: bool = False

    def write(self, folder: Path) -> FileRecord:
        """Writes it into ``folder``, down to the disk."""
        if self.safe:
            return write_safetensors(folder / self.name, without_duplicates(self.content))
        return write_pickle(folder / self.name, self.content)


@dataclass(frozen=True)
class Parts:
    """What a program prepared, in the order of ``prepare``."""

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    scaler: Any = None


def numbered_name(name: str, index: int) -> str:
    """``name`` for object 0, ``stem_1.suffix`` for object 1."""
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}_{index}.{suffix}" if index else name


def shared_files(parts: Parts, weights: Sequence[Mapping[str, Any]], safe_serialization: bool) -> list[StateFile]:
    """What one process writes for all: models, optimizers, schedulers, stateful loaders and the loss scaler."""
    model_name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    files = [
        StateFile(numbered_name(model_name, index), state, safe_serialization) for index, state in enumerate(weights)
    ]
    stateful = {
        index: loader
        for index, loader in enumerate(parts.dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }
    for name, objects in (
        ("optimizer.bin", dict(enumerate(parts.optimizers))),
        ("scheduler.bin", dict(enumerate(parts.schedulers))),
        ("dl_state_dict.bin", stateful),
    ):
        files += [StateFile(numbered_name(name, index), one.state_dict()) for index, one in objects.items()]
    if parts.scaler is not None:
        files.append(StateFile("scaler.pt", parts.scaler.state_dict()))
    return files


def random_states_file(rank: int, step: int) -> StateFile:
    """What every process writes: the states of its random generators, and its accumulation step."""
    return StateFile(f"random_states_{rank}.pkl", random_states(step))


def custom_file(index: int, state: Any) -> StateFile:
    """The state of object ``index`` that the user registered."""
    return StateFile(f"custom_checkpoint_{index}.pkl", state)


def load_parts(
    folder: Path,
    parts: Parts,
    rank: int,
    map_location: Any = "cpu",
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_kwargs: Any,
) -> dict[str, Any]:
    """Loads all that :func:`shared_files` and :func:`random_states_file` name.

    Args:
        map_location: the device that states are read to.
        load_kwargs: for ``torch.load`` of optimizers, schedulers and loaders.
        load_model_kwargs: for ``load_state_dict`` of the models.

    Returns:
        ``{"step": …}``, where the checkpoint knows it.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    options = dict(load_kwargs or {})
    for index, model in enumerate(parts.models):
        state = read_model(folder, index, map_location)
        if load_model_kwargs.get("assign"):
            state = {name: value.clone() for name, value in state.items()}
        model.load_state_dict(fit_names(state, model), **load_model_kwargs)
    for name, objects, location in (
        ("optimizer.bin", parts.optimizers, map_location),
        ("scheduler.bin", parts.schedulers, None),
    ):
        for index, one in enumerate(objects):
            path = folder / numbered_name(name, index)
            one.load_state_dict(read_pickle(path, f"the state of {name[:-4]} {index}", location, **options))
    for index, loader in enumerate(parts.dataloaders):
        path = folder / numbered_name("dl_state_dict.bin", index)
        if getattr(loader, "use_stateful_dataloader", False) and path.is_file():
            loader.load_state_dict(read_pickle(path, f"the state of data loader {index}", **options))
    _load_scaler(folder / "scaler.pt", parts.scaler)
    return _load_random_states(folder, rank)


def read_model(folder: Path, index: int = 0, map_location: Any = "cpu") -> dict[str, Any]:
    """The state of model ``index``: of ``model.safetensors``, or else of ``pytorch_model.bin``."""
    safe, pickled = (folder / numbered_name(name, index) for name in ("model.safetensors", "pytorch_model.bin"))
    holds = f"the weights of model {index}"
    if not safe.is_file() and pickled.is_file():
        state: dict[str, Any] = read_pickle(pickled, holds, map_location)
        return state
    return {name: tensor.to(map_location) for name, tensor in read_safetensors(safe, holds).items()}


def fit_names(state: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """``state`` under the names of ``model``, with the tied weights that are left out in safetensors files.

    Names that differ only in what a wrapper or ``torch.compile`` puts in front of them all are brought together.
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
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def _load_scaler(path: Path, scaler: Any) -> None:
    if scaler is None:
        return
    state = read_pickle(path, "the state of the loss scaler") if path.is_file() else {}
    if state:
        scaler.load_state_dict(state)
    elif scaler.is_enabled():
        _log.warning("%s has no state of a loss scaler: the scale starts anew", path.parent)


def _load_random_states(folder: Path, rank: int) -> dict[str, Any]:
    own, first = folder / f"random_states_{rank}.pkl", folder / "random_states_0.pkl"
    if own.is_file():
        states = read_pickle(own, f"the random states of rank {rank}")
        if not isinstance(states, Mapping):
            raise CheckpointError(f"{own}: expected a dict of random states, found {type(states).__name__}")
        restore_random_states(states, str(own))
    elif first.is_file():
        _log.warning("%s is missing: rank %d, which is new, keeps its random states", own, rank)
        states = read_pickle(first, "the random states of rank 0")
    else:
        _log.warning("%s is missing: random states are kept as they are", own)
        states = {}
    return {"step": states["step"]} if "step" in states else {}


def load_custom(folder: Path, objects: Sequence[Any]) -> None:
    """Loads the states of the objects that the user registered. Pickles of these may run code, as in the original."""
    for index, one in enumerate(objects):
        load_custom_object(folder, one, index)


def load_custom_object(folder: Path, one: Any, index: int) -> None:
    """Loads the state of registered object ``index``."""
    path = folder / f"custom_checkpoint_{index}.pkl"
    one.load_state_dict(read_pickle(path, f"the state of {type(one).__name__}", "cpu", weights_only=False))


def check_custom(folder: Path, objects: Sequence[Any]) -> None:
    """Raises ``CheckpointError`` unless ``folder`` has a state for each of ``objects``, and no more."""
    found = sum(1 for path in folder.iterdir() if _CUSTOM.fullmatch(path.name))
    if found != len(objects):
        raise CheckpointError(
            f"{folder} has {found} custom checkpoints, and {len(objects)} objects are registered; register the objects "
            "that the checkpoint was saved with, in the same order, before load_state"
        )
