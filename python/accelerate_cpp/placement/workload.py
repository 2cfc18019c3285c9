"""What a model holds in addition to its weights while it runs, so that a device map leaves room for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.empty_models import inputs_of
from accelerate_cpp.placement.kv_cache import kv_cache_bytes
from accelerate_cpp.placement.model_memory import Inputs, activation_bytes_by_module, peak_activation_bytes
from accelerate_cpp.placement.module_sizes import Dtype
from accelerate_cpp.placement.module_tensors import as_dtype
from accelerate_cpp.plugins.enums import CustomDtype

__all__ = ["Needs", "Workload", "needs_of"]


@dataclass(frozen=True)
class Workload:
    """The memory that a device map leaves free in addition to the weights.

    To generate, each layer needs a cache of keys and values, and each accelerator what activations take when most of
    them are alive. In training each module needs what autograd saves in it; gradients and states of an optimizer do not
    count. Activations are found by a forward pass on tensors without data, with the kernels of the CPU.

    Attributes:
        batch_size: sequences at a time.
        sequence_length: tokens of each in the end; ``None`` is 512, or what the model can take if that is less.
        dtype: of activations and cache; ``None`` is that of the weights.
        training: with a backward pass, and without a cache.
        activation_bytes: what activations take on each accelerator, so that they are not estimated.
        class_bytes: what each module of a class needs, by the name of the class. With it activations are not estimated.
        make_inputs: makes positional and named arguments of a forward pass; models of transformers do not need it.
    """

    batch_size: int = 1
    sequence_length: int | None = None
    dtype: torch.dtype | str | None = None
    training: bool = False
    activation_bytes: int | None = None
    class_bytes: Mapping[str, int] = field(default_factory=dict)
    make_inputs: Callable[[], Inputs] | None = None

    def __post_init__(self) -> None:
        numbers = {"batch_size": (self.batch_size, 1), "activation_bytes": (self.activation_bytes or 0, 0)}
        numbers["sequence_length"] = (1 if self.sequence_length is None else self.sequence_length, 1)
        numbers |= {f"class_bytes[{name!r}]": (size, 0) for name, size in self.class_bytes.items()}
        for name, (found, least) in numbers.items():
            if found < least:
                raise InvalidArgument(f"Workload: {name}={found}; expected {least} or more")


class Needs(NamedTuple):
    """Bytes in addition to the weights.

    Attributes:
        of_modules: by the name of the module; they are where that module is.
        everywhere: on each accelerator.
    """

    of_modules: dict[str, int]
    everywhere: int


def needs_of(model: nn.Module, workload: Workload | None, dtype: Dtype | None = None) -> Needs:
    """The memory that ``workload`` needs in addition to the weights of ``model``, which may be on the meta device.

    Args:
        dtype: what the weights will be converted to.

    Raises:
        InvalidArgument: something can only be given, not found; the message says what.
    """
    if workload is None:
        return Needs({}, 0)
    weights = _weights(workload.dtype if workload.dtype is not None else dtype)
    needs = {
        name: workload.class_bytes[type(module).__name__]
        for name, module in model.named_modules()
        if type(module).__name__ in workload.class_bytes
    }
    if not workload.training:
        for name, size in _cache(model, workload, weights).items():
            needs[name] = needs.get(name, 0) + size
    everywhere = workload.activation_bytes or 0
    if workload.activation_bytes is None and not workload.class_bytes:
        if workload.training:
            needs = _measured(model, workload, weights, activation_bytes_by_module)
        else:
            everywhere = _measured(model, workload, weights, peak_activation_bytes)
    return Needs(needs, everywhere)


def _weights(dtype: Dtype | None) -> torch.dtype | None:
    """The dtype that the model computes in; ``None`` leaves that of its parameters, as quantised ones do."""
    found = None if isinstance(dtype, CustomDtype) else as_dtype(dtype)
    return found if found is not None and found.is_floating_point else None


def _measured(model: nn.Module, workload: Workload, weights: torch.dtype | None, measure: Callable[..., Any]) -> Any:
    make_inputs = workload.make_inputs
    if make_inputs is None:
        make_inputs, _ = inputs_of(model, workload.batch_size, workload.sequence_length, workload.training)
    try:
        return measure(model, make_inputs, weights)
    except Exception as error:  # the model's own code, which may look at values that are not there
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidArgument(
            f"Workload: a forward pass of {type(model).__name__} without data failed, so the size of its activations "
            f"is unknown ({text}); pass {'class_bytes' if workload.training else 'activation_bytes'}"
        ) from error


def _cache(model: nn.Module, workload: Workload, weights: torch.dtype | None) -> dict[str, int]:
    """Bytes of the cache by the names of the layers; nothing if the model does not generate."""
    config: Any = getattr(model, "config", None)
    can_generate: Any = getattr(model, "can_generate", None)
    if config is None or not getattr(config, "use_cache", True) or (can_generate is not None and not can_generate()):
        return {}
    length = workload.sequence_length
    if length is None:
        _, length = inputs_of(model, workload.batch_size)
    dtype = weights or next(
        (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32
    )
    sizes = kv_cache_bytes(config, workload.batch_size, length, dtype)
    return dict(zip(_layer_names(model, len(sizes)), sizes, strict=True))


def _layer_names(model: nn.Module, count: int) -> list[str]:
    """The names of the ``count`` layers that generate: the first list of so many, in the decoder if there is one."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder = None if get_decoder is None else get_decoder()
    for part in (decoder, model):
        if isinstance(part, nn.Module):
            start = next((name for name, module in model.named_modules() if module is part), "")
            for name, module in part.named_modules(prefix=start):
                if isinstance(module, nn.ModuleList) and len(module) == count:
                    return [f"{name}.{number}" for number in range(count)]
    raise InvalidArgument(
        f"Workload: {type(model).__name__} has no list of {count} layers, as its configuration says; pass class_bytes "
        "and config.use_cache=False"
    )
