"""Which layers of a model are split, and how: as the user says, as Transformers says of its models, or by shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.tensor.known_plans import known_styles
from accelerate_cpp.parallel.tensor.probe import Between
from accelerate_cpp.parallel.tensor.styles import COLUMNS, ROWS, SUMMED, require_fit

Styles = dict[str, Any]

# Layers of attention that are split by their outputs, and those that take the outputs of all of them.
_ATTENTION = (
    {"q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "to_q", "to_k", "to_v", "q_lin", "k_lin"}
    | {"v_lin", "q", "k", "v"},
    {"o_proj", "out_proj", "wo", "to_out", "out_lin", "o", "proj", "dense", "out"},
)
_FEED_FORWARD = (
    {"gate_proj", "up_proj", "w1", "w3", "fc1", "linear1", "lin1", "c_fc", "dense_h_to_4h", "wi", "wi_0", "wi_1"}
    | {"fc_in", "up", "gate"},
    {"down_proj", "w2", "fc2", "linear2", "lin2", "c_proj", "dense_4h_to_h", "wo", "fc_out", "down"},
)
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead")
_HEADS_OF_KEYS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")
_FEATURES_OF_HEADS = ("all_head_size", "inner_dim")
# Between two layers of an nn.Sequential: what treats each feature alone.
_ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.ReLU6, nn.SELU, nn.Dropout, nn.Identity),
)


@dataclass(frozen=True)
class Plan:
    """How a model is split.

    Attributes:
        styles: by the names of modules.
        attention: modules that compute with fewer heads then, of which they have to be told the number.
    """

    styles: Mapping[str, Any]
    attention: Sequence[str] = ()

    def of_part(self, part: nn.Module) -> Plan:
        """What concerns ``part``, which has some of the modules of the model under their names there."""
        names = {name for name, _ in part.named_modules()}
        styles = {name: style for name, style in self.styles.items() if name in names}
        return Plan(styles, [name for name in self.attention if name in names])


def is_found_by_shapes(model: nn.Module, given: Mapping[str, Any] | None) -> bool:
    """Whether nobody says how ``model`` is split."""
    return given is None and not getattr(model, "_tp_plan", None) and known_styles(model) is None


def plan_for(model: nn.Module, given: Mapping[str, Any] | None, processes: int) -> Plan:
    """How ``model`` is split over ``processes``.

    Args:
        given: styles by names of modules, in which ``*`` stands for any number; ``None`` chooses.

    Raises:
        InvalidArgument: a name fits no module, a layer cannot be split as the plan says, or there is no plan for this
            model.
    """
    own = getattr(model, "_tp_plan", None)
    known = known_styles(model)
    if given is not None:
        plan = Plan(_expanded(model, given))
        _refuse_ties(model, plan.styles)
    elif own:
        plan = Plan(_without_ties(model, _expanded(model, own, strict=False)))
        _require_whole_heads(model, plan.styles, processes)
    elif known is not None:
        styles, attention = known
        plan = Plan(_without_ties(model, styles), attention)
        _require_whole_heads_of(model, attention, processes)
    else:
        plan = _by_shapes(model, processes)
    modules = dict(model.named_modules())
    for name, style in plan.styles.items():
        require_fit(name, modules[name], style, processes)
    if not plan.styles:
        raise InvalidArgument(
            f"tensor parallelism: {type(model).__name__} has no layer that tp_size={processes} could split: expected "
            "attention (q_proj, k_proj, v_proj, o_proj, or other usual names) or feed-forward layers (up_proj, "
            "down_proj, ...) of nn.Linear. Pass TorchTensorParallelConfig(plan={'layers.*.fc1': 'colwise', "
            "'layers.*.fc2': 'rowwise'}) as the tp_handler"
        )
    return plan


def _expanded(model: nn.Module, patterns: Mapping[str, Any], strict: bool = True) -> Styles:
    names = [name for name, _ in model.named_modules() if name]
    plan: Styles = {}
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        found = [name for name in names if expression.fullmatch(name)]
        if strict and not found:
            raise InvalidArgument(
                f"tensor parallelism: the plan has {pattern!r}, but {type(model).__name__} has no such module; its "
                f"modules are {', '.join(names[:5])}, ... A * stands for a number"
            )
        plan |= dict.fromkeys(found, style)
    return plan


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """By the ``id`` of each parameter that several modules have, the names of these."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    return {parameter: names for parameter, names in holders.items() if len(names) > 1}


def _refuse_ties(model: nn.Module, plan: Mapping[str, Any]) -> None:
    for first, *others in _tied(model).values():
        for second in others:
            if first in plan or second in plan:
                raise InvalidArgument(
                    f"tensor parallelism: {first!r} and {second!r} share a parameter, so that neither can be split; "
                    "leave both out of the plan, or untie them"
                )


def _without_ties(model: nn.Module, plan: Styles) -> Styles:
    """What shares parameters stays whole on every process."""
    tied = {name for names in _tied(model).values() for name in names}
    return {name: style for name, style in plan.items() if name not in tied}


def _require_whole_heads(model: nn.Module, plan: Mapping[str, Any], processes: int) -> None:
    """Layers of Transformers' attention are cut into heads of ``head_dim`` features, of which each process has some."""
    modules = dict(model.named_modules())
    for name, style in plan.items():
        parent = modules[name.rpartition(".")[0]]
        head_dim, features = getattr(parent, "head_dim", None), getattr(modules[name], "out_features", None)
        if style == COLUMNS and head_dim and features and features // head_dim % processes:
            raise _odd_heads(name, features // head_dim, processes)


def _require_whole_heads_of(model: nn.Module, attention: Sequence[str], processes: int) -> None:
    for name in attention:
        for attribute in _HEADS:
            heads = model.get_submodule(name).__dict__.get(attribute)
            if isinstance(heads, int) and heads % processes:
                raise _odd_heads(name, heads, processes)


def _odd_heads(name: str, heads: int, processes: int) -> InvalidArgument:
    return InvalidArgument(
        f"tensor parallelism: {name!r} computes {heads} heads, which cannot be shared out over tp_size={processes}; "
        "choose a tp_size that divides them"
    )


def _by_shapes(model: nn.Module, processes: int) -> Plan:
    """Layers of which one shares a parameter stay whole together."""
    styles: Styles = {}
    tied = _tied(model)
    attention: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Sequential):
            styles |= {f"{prefix}{own}": style for own, style in _of_sequence(module, tied).items()}
            continue
        linear = {own: one for own, one in module.named_children() if isinstance(one, nn.Linear)}
        for kind in (_ATTENTION, _FEED_FORWARD):
            columns, rows = ([own for own in linear if own in names] for names in kind)
            if len(rows) != 1 or not _fits([linear[own] for own in columns], linear[rows[0]]):
                continue
            if any(id(one) in tied for own in (*columns, *rows) for one in linear[own].parameters()):
                continue
            if kind is _ATTENTION:
                if len(columns) != 3 or not _head_dim(module, linear[columns[0]]):
                    continue
                _require_heads(prefix, module, {own: linear[own] for own in columns}, processes)
            between = _summed_between(module, [linear[own] for own in columns], linear[rows[0]], processes)
            if between is None:
                continue
            if kind is _ATTENTION:
                attention.append(name)
            styles |= {f"{prefix}{own}": SUMMED for own in between}
            styles |= {f"{prefix}{own}": COLUMNS for own in columns} | {f"{prefix}{rows[0]}": ROWS}
    return Plan(styles, attention)


def _summed_between(
    parent: nn.Module, columns: Sequence[nn.Linear], rows: nn.Linear, processes: int
) -> list[str] | None:
    """The modules in ``parent`` that compute with the part of each process, and have parameters.

    Returns:
        ``None`` if the layers cannot be split: what lies between depends on all features, or has an entry for each.
    """
    used = Between(parent, columns, rows).parameters(processes)
    if used is None or any(rows.in_features in one.shape for one in used):
        return None
    ids = {id(one) for one in used}
    found = [
        (name, module)
        for name, module in parent.named_modules()
        if any(id(one) in ids for one in module.parameters(recurse=False))
    ]
    # The parent itself has parameters of its own there, or a module has others besides.
    if any(not name or any(id(one) not in ids for one in module.parameters(recurse=False)) for name, module in found):
        return None
    return [name for name, _ in found]


def _of_sequence(module: nn.Sequential, tied: Collection[int]) -> dict[str, str]:
    """Two linear layers with nothing but elementwise functions between them."""
    plan: dict[str, str] = {}
    before: str | None = None
    for own, one in module.named_children():
        if isinstance(one, nn.Linear) and not any(id(parameter) in tied for parameter in one.parameters()):
            if before is not None and _fits([module.get_submodule(before)], one):  # type: ignore[list-item]
                plan |= {before: COLUMNS, own: ROWS}
                before = None
            else:
                before = own
        elif not isinstance(one, _ELEMENTWISE):
            before = None
    return plan


def _fits(columns: Sequence[nn.Linear], rows: nn.Linear) -> bool:
    """Whether ``rows`` takes what the first of ``columns`` computes, and the others as much or a part of that."""
    return bool(columns) and (
        columns[0].out_features == rows.in_features
        and all(one.in_features == columns[0].in_features for one in columns)
        and all(rows.in_features % one.out_features == 0 for one in columns)
    )


def _head_dim(attention: nn.Module, queries: nn.Linear) -> int | None:
    """The features of a head, from an attribute of ``attention``; ``None`` if none says so."""
    heads = [getattr(attention, name) for name in _HEADS if isinstance(getattr(attention, name, None), int)]
    return queries.out_features // heads[0] if heads else getattr(attention, "head_dim", None)


def _require_heads(prefix: str, attention: nn.Module, columns: Mapping[str, nn.Linear], processes: int) -> None:
    head_dim = _head_dim(attention, next(iter(columns.values())))
    assert head_dim is not None  # the caller has looked
    for own, layer in columns.items():
        if layer.out_features // head_dim % processes:
            raise _odd_heads(f"{prefix}{own}", layer.out_features // head_dim, processes)


def tell_heads(attention: nn.Module, processes: int) -> None:
    """Divides the numbers of heads, and of their features, that ``attention`` reads by ``processes``."""
    for attribute in (*_HEADS, *_HEADS_OF_KEYS, *_FEATURES_OF_HEADS):
        found = attention.__dict__.get(attribute)
        if isinstance(found, int) and found % processes == 0:
            setattr(attention, attribute, found // processes)
