"""States of optimizers by the names of parameters, which do not depend on how many processes share them out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from accelerate_cpp.checkpoint.fitting import require_form_of_optimizer
from accelerate_cpp.errors import CheckpointError

_WRAPPERS = re.compile(r"(?:_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")


def without_wrappers(name: str) -> str:
    """``name`` of a parameter in the user's model, without those of the compiler and of activation checkpoints."""
    return _WRAPPERS.sub("", name)


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch in what ``prepare`` returned."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of all groups, in the order of the numbers that they have in the state of the optimizer."""
    return [parameter for group in inner_optimizer(optimizer).param_groups for parameter in group["params"]]


Named = Iterable[tuple[str, torch.Tensor]]


class NamedParameters(list[tuple[str, torch.Tensor]]):
    """The parameters of a model with their names.

    Attributes:
        elsewhere: names of what only other processes have of the model.
    """

    def __init__(self, named: Named = (), elsewhere: Collection[str] = ()) -> None:
        super().__init__(named)
        self.elsewhere = frozenset(elsewhere)


def names_of(optimizer: Any, models: Iterable[Named]) -> list[str]:
    """The names of those parameters in ``models``: in the first model as they are there, in others with its number.

    A parameter of no model is named by its number.

    Args:
        models: the named parameters of each.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index, model in enumerate(models):
        for name, parameter in model:
            name = without_wrappers(name)
            if id(parameter) not in names:
                names[id(parameter)] = f"model_{index}.{name}" if name in taken else name
        taken.update(names.values())
    return [names.get(id(one), f"parameter_{number}") for number, one in enumerate(parameters_of(optimizer))]


def is_named(state: Any) -> bool:
    """Whether ``state`` of an optimizer has names instead of numbers."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return isinstance(groups, Sequence) and any(
        isinstance(name, str) for group in groups if isinstance(group, Mapping) for name in group.get("params", ())
    )


def named(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """``state`` of an optimizer with names instead of numbers."""
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def elsewhere_in(models: Iterable[Named]) -> frozenset[str]:
    """The names in states of optimizers of what only other processes have."""
    found: set[str] = set()
    for index, model in enumerate(models):
        names: frozenset[str] = getattr(model, "elsewhere", frozenset())
        found |= {spelling for name in names for spelling in (name, f"model_{index}.{name}")}
    return frozenset(found)


def numbered(
    state: Mapping[str, Any], names: Sequence[str], source: str, elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """The inverse of :func:`named`, for an optimizer whose parameters have these ``names``.

    Args:
        elsewhere: names that are left out, as the optimizers of other processes have them.

    Raises:
        CheckpointError: the names are others, or ``state`` is none of an optimizer.
    """
    require_form_of_optimizer(state, source)
    numbers = {name: number for number, name in enumerate(names)}
    here = [
        [one for one in group["params"] if one in numbers or one not in elsewhere] for group in state["param_groups"]
    ]
    found = [name for group in here for name in group]
    lacking = [name for name in names if name not in set(found)]
    foreign = [name for name in found if name not in numbers]
    if lacking or foreign:
        wrong = (f"it lacks {lacking[0]}" if lacking else "") + (" and " if lacking and foreign else "")
        wrong += f"it has {foreign[0]}, which the optimizer lacks" if foreign else ""
        raise CheckpointError(
            f"{source} does not fit the optimizer: {wrong}. Prepare the model and the optimizer that the checkpoint "
            "was saved with; nothing has been changed"
        )
    return {
        "state": {numbers[name]: value for name, value in state["state"].items() if name in numbers},
        "param_groups": [
            {**group, "params": sorted(numbers[name] for name in own)}  # as the optimizer has them
            for group, own in zip(state["param_groups"], here, strict=True)
        ],
    }
