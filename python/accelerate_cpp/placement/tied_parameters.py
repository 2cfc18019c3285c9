"""Parameters that several modules share: finding them, checking where they are put, and sharing them again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.placement.module_tensors import is_meta, slot_of, walk

__all__ = [
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "ensure_weights_retied",
    "find_tied_parameters",
    "retie_on_each_device",
    "retie_parameters",
    "warn_of_untied",
]

_logger = logging.getLogger(__name__)

Device = int | str | torch.device


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The groups of names under which ``model`` has the same ``Parameter`` object; each group is sorted.

    Args:
        kwargs: accepted as by the original, where they are for its own use; they change nothing.
    """
    names_of: dict[int, list[str]] = {}
    for prefix, module in walk(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names_of.setdefault(id(parameter), []).append(prefix + name)
    return [sorted(names) for names in names_of.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Gives all names of each group the same ``Parameter`` again: the first that has values, else the first.

    Raises:
        InvalidArgument: ``model`` has no such parameter.
    """
    for group in tied_params:
        slots = [slot_of(model, name) for name in group]
        found = [parameter for owner, name in slots if (parameter := owner._parameters.get(name)) is not None]
        chosen = next((parameter for parameter in found if not is_meta(parameter)), found[0] if found else None)
        if chosen is not None:
            for owner, name in slots:
                owner._parameters[name] = chosen


def retie_on_each_device(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Like :func:`retie_parameters`, but joins only names whose parameters are on the same device."""
    for group in tied_params:
        by_device: dict[torch.device, list[str]] = {}
        for path in group:
            owner, name = slot_of(model, path)
            parameter = owner._parameters.get(name)
            if parameter is not None:
                by_device.setdefault(parameter.device, []).append(path)
        retie_parameters(model, list(by_device.values()))


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the configuration of a model of transformers says that it shares parameters; false for other models."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    text_config = config if get_text_config is None else get_text_config(decoder=True)
    if getattr(text_config, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:  # type: ignore[operator]
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def warn_of_untied(model: nn.Module, tied_params: Sequence[Sequence[str]], caller: str) -> None:
    """Logs a warning if the configuration of ``model`` says that it shares parameters, and it does not."""
    if not tied_params and check_tied_parameters_in_config(model):
        _logger.warning(
            "%s: the configuration of %s says that it shares weights, but it does not; call its tie_weights() before",
            caller,
            type(model).__name__,
        )


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> None:
    """Logs a warning for each group of shared parameters that ``device_map`` puts on different devices."""
    for group in tied_params:
        places = {name: device_of(device_map, name) for name in group}
        if len({str(place) for place in places.values()}) > 1:
            _logger.warning(
                "device_map puts a shared parameter on different devices: %s. Give them one device, or pass "
                "device_map='auto'",
                places,
            )


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | None
) -> Callable[[nn.Module], Any]:
    """``param_init_fn`` for modules of ``model`` one after the other, which then share parameters as they do now.

    Args:
        param_init_fn: gives the parameters of one module values, maybe by making new ones, and returns the module.
        device: where it does so; it knows itself.
    """
    shared = {id(parameter) for parameter in _shared_parameters(model)}
    if not shared:
        return param_init_fn
    keep = list(model.parameters())  # so that no new parameter gets the id of one of these
    renewed: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> Any:
        before = {name: id(old) for name, old in module._parameters.items() if old is not None and id(old) in shared}
        result: nn.Module = param_init_fn(module)
        for name, old in before.items():
            result._parameters[name] = renewed.setdefault(old, result._parameters[name])  # type: ignore[arg-type]
        return result

    initialise.kept = keep  # type: ignore[attr-defined]
    return initialise


def _shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    groups = find_tied_parameters(model)
    slots = (slot_of(model, group[0]) for group in groups)
    return [parameter for owner, name in slots if (parameter := owner._parameters[name]) is not None]
