"""Checks whether saved states fit the objects that will load them, before any of these is changed.

Only the loading code of a custom object knows which states it accepts: it can have a method
``check_state_dict(state)``, which raises and changes nothing; otherwise its state is accepted unchecked.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from accelerate_cpp.config.text import shortened
from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.errors import CheckpointError

_NAMED = 5  # names in a message
_TORCHS_OWN = "torch.nn.modules."
_TORCHS_OPTIMIZERS = "torch.optim."
# Entries that torch allows to be missing in states that were saved without module versions.
_OPTIONAL = "num_batches_tracked"
_MORE_ELEMENTS, _FEW_ELEMENTS = 16, 1 << 16  # that optimizers may keep for each of a parameter, and for any
# Entries that optimizers keep for each element of a parameter.
_PER_ELEMENT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
# Entries that torch removes from the state of a schedule.
_OF_SCHEDULES = ("lr_lambdas", "_schedulers")


def check_model(state: Any, model: torch.nn.Module, source: str, strict: bool = True) -> None:
    """Raises ``CheckpointError`` if ``model.load_state_dict(state, strict)`` would, as far as that is torch's own."""
    _require_mapping(state, source)
    if _loads_in_a_way_of_its_own(model):
        return
    own = model.state_dict()
    wrong = []
    if strict:
        missing = [name for name in own if name not in state and not name.endswith(_OPTIONAL)]
        wrong += _listed("it lacks", missing)
        wrong += _listed("it has, but the model lacks,", [name for name in state if name not in own])
    shapes = [
        f"{name} {_shape_of(state[name])} for {_shape_of(value)}"
        for name, value in own.items()
        if name in state and not _fits(state[name], value)
    ]
    wrong += _listed("shapes differ:", shapes)
    others = [
        f"{name} (a {type(state[name]).__name__})"
        for name, value in own.items()
        if name in state and isinstance(value, torch.Tensor) and not isinstance(state[name], torch.Tensor)
    ]
    wrong += _listed("these are not tensors:", others)
    if wrong:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {'; '.join(wrong)}. Prepare the model that the checkpoint "
            "was saved with, or load the checkpoint of this one; nothing has been changed"
        )


def check_optimizer(state: Any, optimizer: Any, source: str) -> None:
    """Raises ``CheckpointError`` if ``state`` has other groups, or other shapes, than ``optimizer`` has parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    _require_mapping(state, source)
    _ask(inner, state)
    if type(inner).load_state_dict is not torch.optim.Optimizer.load_state_dict or _has_hooks(inner):
        return
    require_form_of_optimizer(state, source)
    sizes = [len(group["params"]) for group in inner.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != sizes:
        raise CheckpointError(
            f"{source} has parameter groups of sizes {saved}, but {type(inner).__name__} has groups of sizes {sizes}; "
            "pass it the parameters that it was saved with; nothing has been changed"
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    wrong = [
        f"{name} of parameter {number} {_shape_of(one[name])} for {tuple(parameter.shape)}"
        for number, parameter in zip(numbers, parameters, strict=True)
        if isinstance(one := state["state"].get(number), Mapping)
        for name in _PER_ELEMENT
        if isinstance(one.get(name), torch.Tensor) and _shape_of(one[name]) != _shape_of(parameter)
    ]
    copies = [
        f"those of parameter {number} {tuple(parameter.shape)} that {reason}"
        for number, parameter in zip(numbers, parameters, strict=True)
        if (reason := _why_not_copied(list(_tensors_in(state["state"].get(number))), parameter))
    ]
    complaints = _listed("shapes differ:", wrong) + _listed("its tensors cannot be copied:", copies)
    if complaints:
        raise CheckpointError(
            f"{source} does not fit {type(inner).__name__}: {'; '.join(complaints)}. Pass it the "
            "parameters that it was saved with; nothing has been changed"
        )
    are_plain = all(type(parameter) in (torch.Tensor, torch.nn.Parameter) for parameter in parameters)
    if are_plain and type(inner).__module__.startswith(_TORCHS_OPTIMIZERS):
        _try_on_a_double(inner, state, source)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    for leaf in leaves_of(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (set, frozenset)):
            yield from _tensors_in([*leaf])


def _why_not_copied(tensors: Sequence[torch.Tensor], parameter: torch.Tensor) -> str:
    """Why copies of what an optimizer keeps of a parameter cannot be made, or need more memory than it has now."""
    if any(one.is_meta or one.is_nested for one in tensors) and not parameter.is_meta:
        return "have no values, or no shape"
    plain = [one for one in tensors if one.layout is torch.strided and type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = [one.untyped_storage() for one in plain if not one.is_meta]
    size = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    elements = sum(one.numel() for one in plain)
    if elements > size + _MORE_ELEMENTS * parameter.numel() + _FEW_ELEMENTS:
        return f"have {elements} elements, written out, in {size} bytes"
    return ""


def require_form_of_optimizer(state: Mapping[str, Any], source: str) -> None:
    """Raises ``CheckpointError`` unless ``state`` has a dict of states, and a list of groups of parameters."""
    _require_entries(state, ("state", "param_groups"), source)
    groups = state["param_groups"]
    is_sound = (
        isinstance(state["state"], Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and all(isinstance(number, int | str) for group in groups for number in group["params"])
    )
    if not is_sound:
        raise CheckpointError(
            f"{source}: expected the state of an optimizer, with a dict 'state' and a list 'param_groups' of dicts "
            "with lists 'params' of numbers; found other types there. It is damaged or from another program: load "
            "another checkpoint; nothing has been changed"
        )


def _try_on_a_double(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], source: str) -> None:
    """Makes an optimizer of the same class load ``state``, for parameters without memory.

    Raises:
        CheckpointError: it cannot, or it would lack settings that it needs for a step.
    """
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.state = defaultdict(dict)
    double.param_groups = [
        {**group, "params": [parameter.detach().to("meta") for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    double._optimizer_load_state_dict_post_hooks = OrderedDict()
    name = type(optimizer).__name__
    try:
        double.load_state_dict(dict(state))
    except Exception as error:
        raise CheckpointError(
            f"{source} is not the state of {name}, which cannot load it ({type(error).__name__}: {error}); prepare the "
            "kind of optimizer that it was saved with, or load another checkpoint; nothing has been changed"
        ) from error
    groups = zip(double.param_groups, optimizer.param_groups, strict=True)
    lacking = sorted({key for group, own in groups for key in optimizer.defaults if key in own and key not in group})
    if lacking:
        raise CheckpointError(
            f"{source} is not the state of {name}: {_listed('its groups lack', lacking)[0]}; prepare the kind of "
            "optimizer that it was saved with, or load another checkpoint; nothing has been changed"
        )


def check_scheduler(state: Any, scheduler: Any, source: str) -> None:
    """Raises ``CheckpointError`` if ``state`` lacks entries that ``scheduler`` reads."""
    inner = getattr(scheduler, "scheduler", scheduler)
    _require_mapping(state, source)
    _ask(inner, state)
    if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
        own = vars(inner)
        needed = [name for name in _OF_SCHEDULES if name in own]
        if "last_epoch" in own and type(inner).__module__.startswith(_TORCHS_OPTIMIZERS):
            needed.append("last_epoch")
        _require_entries(state, needed, source)
        if type(inner).load_state_dict.__module__.startswith(_TORCHS_OPTIMIZERS):
            _check_parts(state, inner, source)
            _require_no_methods(state, inner, source)


def _check_parts(state: Mapping[str, Any], owner: Any, source: str) -> None:
    """Looks at the states of the schedules that a schedule consists of."""
    schedules = getattr(owner, "_schedulers", None)
    if not schedules:
        return
    parts = state.get("_schedulers")
    if not isinstance(parts, list) or len(parts) != len(schedules):
        raise CheckpointError(
            f"{source}: expected the states of {len(schedules)} schedules in '_schedulers', found "
            f"{shortened(parts)}; load another checkpoint; nothing has been changed"
        )
    for part, schedule in zip(parts, schedules, strict=True):
        check_scheduler(part, schedule, source)


def _require_no_methods(state: Mapping[str, Any], owner: Any, source: str) -> None:
    """Torch puts all entries of a schedule's state into the object, where they would hide its methods."""
    new = [str(name) for name in state if name not in vars(owner)]
    hidden = [name for name in new if callable(getattr(type(owner), name, None))]
    hidden += ["optimizer"] if "optimizer" in state else []
    if hidden:
        raise CheckpointError(
            f"{source}: {hidden[0]!r} is no entry of the state of {type(owner).__name__}, and would replace a part of "
            "it; load another checkpoint; nothing has been changed"
        )


def check_scaler(state: Any, scaler: Any, source: str) -> None:
    """Raises ``CheckpointError`` if ``state`` lacks entries of ``scaler``, which is enabled."""
    _require_mapping(state, source)
    if scaler.is_enabled():
        _require_entries(state, scaler.state_dict(), source)


def check_loader(state: Any, loader: Any, source: str) -> None:
    """Raises if ``state`` is not a state of ``loader``, according to the loader."""
    _require_mapping(state, source)
    _ask(loader, state)


def _ask(owner: Any, state: Any) -> None:
    check = getattr(owner, "check_state_dict", None)
    if check is not None:
        check(state)


def _require_mapping(state: Any, source: str) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source}: expected a dict, found {type(state).__name__}; load another checkpoint")


def _require_entries(state: Mapping[str, Any], names: Any, source: str) -> None:
    missing = [str(name) for name in names if name not in state]
    if missing:
        raise CheckpointError(
            f"{source} {_listed('lacks', missing)[0]}; it belongs to another kind of object: load another checkpoint, "
            "or prepare the object that it was saved with; nothing has been changed"
        )


def _shape_of(value: torch.Tensor) -> tuple[int, ...] | str:
    return "(nested)" if value.is_nested else tuple(value.shape)


def _fits(saved: Any, own: Any) -> bool:
    if not (isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor)):
        return True
    if own.is_nested or saved.is_nested:
        return bool(own.is_nested and saved.is_nested)
    if saved.is_meta and not own.is_meta:
        return False
    return saved.shape == own.shape or (own.ndim == 0 and saved.ndim == 1)  # what torch 0.3 saved


def _loads_in_a_way_of_its_own(model: torch.nn.Module) -> bool:
    plain = torch.nn.Module
    return any(
        type(module).load_state_dict is not plain.load_state_dict
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or (
            type(module)._load_from_state_dict is not plain._load_from_state_dict
            and not type(module).__module__.startswith(_TORCHS_OWN)
        )
        for module in model.modules()
    )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_load_state_dict_pre_hooks)


def _listed(what: str, names: list[str]) -> list[str]:
    """``what`` and the first of ``names``, as one string in a list, which is empty if there are no names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what} {', '.join(names[:_NAMED])}{more}"] if names else []
