"""The parts of a real model, as its plan and its cut say; values are not needed, so it may be on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.parts import Part, Weight
from accelerate_cpp.parallel.tensor.plans import Plan
from accelerate_cpp.parallel.tensor.sequences import region_of
from accelerate_cpp.parallel.tensor.styles import COLUMNS, GATHERED_COLUMNS, ROWS, SUMMED

__all__ = ["parts_of"]

_SPLIT_EMBEDDING = "embedding_rowwise"


def parts_of(model: nn.Module, stages: Sequence[nn.Module], plan: Plan) -> list[Part]:
    """What the communication of ``stages`` depends on.

    Args:
        model: a decoder of Transformers, in one piece.
        stages: those of ``cut_model``, or the model itself as the only one.
        plan: how layers are split; without any, ``Plan({})``.

    Raises:
        InvalidArgument: the model says nothing of its heads, or layers are split in ways whose communication is not
            known here.
    """
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise InvalidArgument(
            f"costs: the configuration of {type(model).__name__} does not say num_attention_heads; expected a decoder "
            "of Transformers. Describe it by accelerate_cpp.parallel.costs.parts.Decoder"
        )
    _require_known(type(model).__name__, plan)
    layers = _layers_of(model)
    holders: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for weight in stage.parameters():
            holders.setdefault(id(weight), set()).add(number)
    tied = {key for key, numbers in holders.items() if len(numbers) > 1}
    return [
        _part(config, stage, plan.of_part(stage), layers, tied, number == 0, number == len(stages) - 1)
        for number, stage in enumerate(stages)
    ]


def _require_known(name: str, plan: Plan) -> None:
    known = (COLUMNS, ROWS, SUMMED, GATHERED_COLUMNS, _SPLIT_EMBEDDING)
    for module, style in plan.styles.items():
        if style not in known:
            raise InvalidArgument(
                f"costs: {module!r} of {name} is split by {style!r}, whose communication is not known; expected one of "
                f"{', '.join(known)}"
            )


def _layers_of(model: nn.Module) -> Collection[str]:
    """The names of the classes that are units of ``fully_shard``, as the model says."""
    return set(getattr(model, "_no_split_modules", None) or ())


def _part(
    config: Any, stage: nn.Module, plan: Plan, layers: Collection[str], tied: Collection[int], first: bool, last: bool
) -> Part:
    styles = plan.styles
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    blocks = [module for module in stage.modules() if type(module).__name__ in layers]
    gathering, of_tokens = _region(stage, styles)
    heads_out = [name for name, style in styles.items() if style == GATHERED_COLUMNS]
    features = [stage.get_submodule(name).out_features for name in heads_out]
    return Part(
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=kv_heads,
        kv_features=kv_heads * head_dim,
        attentions=len(blocks),
        columns=len({name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}),
        rows=_number_of(styles, ROWS),
        gathering=gathering,
        in_parts=tuple(
            weight.numel()
            for name, style in styles.items()
            if style == SUMMED
            for weight in stage.get_submodule(name).parameters(recurse=False)
        ),
        of_tokens=of_tokens,
        split_embedding=_SPLIT_EMBEDDING in styles.values(),
        gathered_features=int(sum(features)),  # type: ignore[arg-type]
        units=_units(stage, blocks, styles),
        tied=tuple(weight.numel() for weight in stage.parameters() if id(weight) in tied),
        first=first,
        last=last,
    )


def _number_of(styles: Mapping[str, Any], style: str) -> int:
    return sum(1 for found in styles.values() if found == style)


def _region(stage: nn.Module, styles: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """How many modules gather tokens with sequence parallelism, and the parameters used for own tokens, by elements."""
    if ROWS not in styles.values():
        return 0, ()
    region = region_of(stage, styles)
    if len(region.gathering) != _number_of(styles, ROWS):
        raise InvalidArgument(
            "costs: split layers lie in blocks themselves, whose communication with sequence_parallel is not known; "
            "expected them in modules of their own, as attention and feed-forward layers of Transformers are"
        )
    inside = [
        name for name, _ in stage.named_modules() if any(f"{name}.".startswith(f"{block}.") for block in region.blocks)
    ]
    biases = [name for name, style in styles.items() if style == ROWS]
    alone = [
        name
        for name in inside
        if name not in region.styles and not any(f"{name}.".startswith(f"{one}.") for one in region.gathering)
    ]
    found = [weight.numel() for name in alone for weight in stage.get_submodule(name).parameters(recurse=False)]
    for name in biases:
        bias = getattr(stage.get_submodule(name), "bias", None)
        if bias is not None:
            found.append(bias.numel())
    return len(region.gathering), tuple(found)


def _units(stage: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, Any]) -> tuple[tuple[Weight, ...], ...]:
    """The weights of each block, and what is left."""
    split = {}
    for name, style in styles.items():
        module = stage.get_submodule(name)
        for own, weight in module.named_parameters(recurse=False):
            by_outputs = style in (COLUMNS, GATHERED_COLUMNS, _SPLIT_EMBEDDING)
            if style != SUMMED and (by_outputs or own == "weight"):
                split[id(weight)] = 0 if by_outputs else 1
    units, taken = [], set()
    for module in [*blocks, stage]:
        weights = [weight for weight in module.parameters() if id(weight) not in taken]
        taken |= {id(weight) for weight in weights}
        units.append(tuple(Weight(tuple(weight.shape), split.get(id(weight))) for weight in weights))
    return tuple(units)
