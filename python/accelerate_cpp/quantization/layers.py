"""Which linear layers of a model bitsandbytes quantizes, and putting its layers in their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate_cpp.placement.first_fit import is_in_one_of
from accelerate_cpp.placement.tied_parameters import find_tied_parameters
from accelerate_cpp.quantization.options import BnbQuantizationConfig

__all__ = ["kept_by_default", "layers_replaced", "quantizable_layers"]


def kept_by_default(model: nn.Module) -> list[str]:
    """Names of the modules that are not quantized unless that is requested: the head, and those that share parameters.

    The head is the last module of ``model``. Base models of transformers have none.
    """
    tied = {name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group}
    base: Any = getattr(model, "base_model_prefix", None)
    is_base = base is not None and not hasattr(model, base)
    children = [name for name, _ in model.named_children()]
    return sorted({*tied, *children[-1:]}) if tied or not is_base else []


def quantizable_layers(model: nn.Module, kept: Collection[str]) -> list[str]:
    """Names of the linear layers of ``model`` that are not in one of ``kept``.

    Left out as well are those that do not compute as ``torch.nn.Linear`` does, whose weight another module reads past
    them, or shares.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and owners[id(module.weight)] == 1
        and name
        and not is_in_one_of(name, kept)
    ]


@contextmanager
def layers_replaced(model: nn.Module, names: Iterable[str], config: BnbQuantizationConfig) -> Iterator[None]:
    """Puts layers of bitsandbytes in the places of ``names``, with the same weights, which are not quantized yet.

    After an exception within the block the old ones are back.
    """
    old = {name: model.get_submodule(name) for name in names}
    try:
        for name, layer in old.items():
            assert isinstance(layer, nn.Linear)
            _put(model, name, _layer(layer, config))
        yield
    except BaseException:
        for name, layer in old.items():
            _put(model, name, layer)
        raise


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, label = name.rpartition(".")
    setattr(model.get_submodule(parent), label, layer)


def _layer(old: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    import bitsandbytes as bnb

    sizes = (old.in_features, old.out_features)
    has_bias = old.bias is not None
    if config.load_in_8bit:
        options: dict[str, Any] = {"has_fp16_weights": False, "threshold": config.llm_int8_threshold}
        new: nn.Module = bnb.nn.Linear8bitLt(*sizes, bias=has_bias, device="meta", **options)
        weight: Any = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        options = {
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
        }
        new = bnb.nn.Linear4bit(
            *sizes, bias=has_bias, device="meta", compute_dtype=config.bnb_4bit_compute_dtype, **options
        )
        weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, module=new, **options)
    new.weight = weight
    if has_bias:
        new.bias = nn.Parameter(old.bias.data, requires_grad=False)
    return new.train(old.training)
