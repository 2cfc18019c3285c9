"""The states of models and optimizers in shards: as parts of a checkpoint, and one by one for programs that do that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp.checkpoint.fitting import check_model, check_optimizer
from accelerate_cpp.checkpoint.layout import (
    SavedOptimizer,
    StateFile,
    fit_names,
    numbered_name,
    read_model,
    read_optimizer,
    sharded_folder_name,
    whole_files,
)
from accelerate_cpp.checkpoint.names import OPTIMIZER_FILE, OPTIMIZER_NAME, SHARDED_MODEL_FILE, SHARDED_MODEL_NAME
from accelerate_cpp.checkpoint.optimizer_names import Named, NamedParameters, inner_optimizer, named, names_of
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.sharded_folder import ShardedFolder, planned, whole_on
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.strategy import Strategy


@dataclass(frozen=True)
class Parts:
    """What this process writes of models and optimizers that are in shards."""

    files: Sequence[StateFile] = ()
    folders: Sequence[ShardedFolder] = ()


def named_parameters(bundle: Bundle, strategy: Strategy) -> list[NamedParameters]:
    """The parameters of each model with their names, as optimizers hold them."""
    return [
        NamedParameters(strategy.named_parameters(inner), strategy.names_elsewhere(inner))
        for inner in (strategy.unwrap(model) for model in bundle.models)
    ]


def parts_of(bundle: Bundle, strategy: Strategy, ranks: Participants, is_main: bool) -> Parts:
    """The states of models and optimizers as the layout of the run wants them. A collective."""
    names = named_parameters(bundle, strategy)
    optimizers = [_named_state(one, names, strategy) for one in bundle.optimizers]
    if strategy.layout == "whole":
        weights = [strategy.model_state(model, here=is_main) for model in bundle.models]
        gathered = [whole_on(is_main, state) for state in optimizers]
        return Parts(files=whole_files(weights, gathered) if is_main else ())
    models = [strategy.local_state(model) for model in bundle.models]
    states = {sharded_folder_name(SHARDED_MODEL_NAME, index): {"model": state} for index, state in enumerate(models)}
    states |= {sharded_folder_name(OPTIMIZER_NAME, index): {"optimizer": one} for index, one in enumerate(optimizers)}
    return Parts(folders=[planned(name, state, ranks) for name, state in states.items()])


def _named_state(optimizer: Any, models: Sequence[Named], strategy: Strategy) -> dict[str, Any]:
    """Its groups have the names of all parameters, also of those that other processes step on."""
    state = named(inner_optimizer(optimizer).state_dict(), names_of(optimizer, models))
    everywhere = strategy.names_everywhere([group["params"] for group in state["param_groups"]])
    groups = zip(state["param_groups"], everywhere, strict=True)
    return {**state, "param_groups": [{**group, "params": names} for group, names in groups]}


def write_model(
    folder: Path, index: int, model: torch.nn.Module, strategy: Strategy, ranks: Participants, only: set[str] | None
) -> None:
    """Writes the state of ``model`` directly into ``folder``, in the layout of the run. A collective.

    Args:
        only: the names to be written; ``None`` means all.
    """
    state = strategy.local_state(model)
    chosen = {name: value for name, value in state.items() if only is None or name in only}
    _write(
        folder, numbered_name(SHARDED_MODEL_FILE, index), SHARDED_MODEL_NAME, index, "model", chosen, strategy, ranks
    )


def write_optimizer(
    folder: Path, index: int, optimizer: Any, models: Sequence[Named], strategy: Strategy, ranks: Participants
) -> None:
    """Writes the state of ``optimizer`` directly into ``folder``, in the layout of the run. A collective."""
    state = _named_state(optimizer, models, strategy)
    _write(folder, numbered_name(OPTIMIZER_FILE, index), OPTIMIZER_NAME, index, "optimizer", state, strategy, ranks)


def _write(
    folder: Path,
    file: str,
    name: str,
    index: int,
    key: str,
    state: Mapping[str, Any],
    strategy: Strategy,
    ranks: Participants,
) -> None:
    is_main = ranks.place == 0
    if strategy.layout == "whole":
        gathered = whole_on(is_main, state)
        content: Callable[[], Any] = lambda: StateFile(file, gathered).write(folder) if is_main else None  # noqa: E731
        ranks.together(f"writing {folder / file}", content)
        return
    part = planned(sharded_folder_name(name, index), {key: state}, ranks)
    written = ranks.together(f"writing {folder / part.name}", lambda: part.write(folder)[1])
    places = [place for there in written for place in there]
    ranks.together(f"writing {folder / part.name}", lambda: part.write_index(folder, places) if is_main else None)


def load_model(
    folder: Path, index: int, model: torch.nn.Module, strategy: Strategy, ranks: Participants, strict: bool
) -> None:
    """Loads what :func:`write_model`, a checkpoint or the original wrote into ``folder``. A collective.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit; in that case nothing has been changed.
    """
    inner = strategy.unwrap(model)

    def read() -> dict[str, Any]:
        state = fit_names(read_model(folder, index, inner), inner)
        check_model(state, inner, str(folder), strict)
        return state

    own: list[dict[str, Any]] = []
    ranks.together(f"loading {folder}", lambda: own.append(read()))
    strategy.restore_model(inner, own[0])


def load_optimizer(folder: Path, index: int, optimizer: Any, models: Sequence[Named], ranks: Participants) -> None:
    """Loads what :func:`write_optimizer`, a checkpoint or the original wrote into ``folder``. A collective.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit; in that case nothing has been changed.
    """

    def read() -> SavedOptimizer:
        state = read_optimizer(folder, index, optimizer, models)
        check_optimizer(state.content, optimizer, str(folder))
        return state

    own: list[SavedOptimizer] = []
    ranks.together(f"loading {folder}", lambda: own.append(read()))
    own[0].restore(optimizer)
