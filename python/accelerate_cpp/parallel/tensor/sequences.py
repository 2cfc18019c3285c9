"""Sequence parallelism: what lies between split layers is computed by each process for its part of the tokens.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198). The blocks
of a transformer begin with the tokens of their process. A module that holds split layers (attention, feed-forward) gets
all tokens, and its last layer gives each process its part of the sum. Everything else in a block has to treat each
token alone, as norms, residuals and dropout do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.tensor.exchanges import gathered, own_part
from accelerate_cpp.parallel.tensor.styles import (
    COLUMNS,
    COLUMNS_OF_TOKENS,
    ROWS,
    ROWS_OF_TOKENS,
    TOKENS,
    sum_gradients,
)


@dataclass(frozen=True)
class Region:
    """Where a model computes with the tokens of each process.

    Attributes:
        blocks: modules that follow each other, by name: their inputs and outputs are the tokens of this process.
        gathering: modules in them whose inputs are all tokens, as they hold split layers.
        styles: of split layers, in terms of tokens.
    """

    blocks: Sequence[str]
    gathering: Sequence[str]
    styles: Mapping[str, Any]


def region_of(model: nn.Module, styles: Mapping[str, Any]) -> Region:
    """The region of ``model``, split by ``styles``.

    Raises:
        InvalidArgument: split layers are not in modules of one ``nn.ModuleList`` or ``nn.Sequential`` that follow each
            other.
    """
    last = [name for name, style in styles.items() if style == ROWS]
    blocks = _blocks(model, last)
    if not blocks:
        raise InvalidArgument(
            f"sequence_parallel=True: the split layers of {type(model).__name__} are not in blocks that follow each "
            "other in an nn.ModuleList or nn.Sequential, so that nothing tells where parts of sequences begin and end; "
            "leave sequence_parallel out"
        )
    inside = {name for name in last if _is_in(name, blocks)}
    parents = {name.rpartition(".")[0] for name in inside}
    in_tokens: dict[str, Any] = {}
    for name, style in styles.items():
        if style == ROWS and name in inside:
            in_tokens[name] = ROWS_OF_TOKENS
        elif style == COLUMNS and name.rpartition(".")[0] in parents & set(blocks):
            in_tokens[name] = COLUMNS_OF_TOKENS
    return Region(blocks, sorted(parents - set(blocks)), {**styles, **in_tokens})


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _blocks(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The modules that hold ``layers``, of the list of modules that has most of them; none if there are gaps."""
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [f"{name}.{own}" if name else own for own, _ in module.named_children()]
            found = [
                number for number, child in enumerate(children) if any(one.startswith(f"{child}.") for one in layers)
            ]
            whole = bool(found) and found == list(range(found[0], found[-1] + 1))
            if whole and len(found) > len(best):
                best = [children[number] for number in found]
    return best


def split_tokens(model: nn.Module, region: Region, group: dist.ProcessGroup) -> None:
    """Cuts tokens at the beginning of ``region``, gathers them at its end and where split layers need them."""
    first, last = (model.get_submodule(region.blocks[end]) for end in (0, -1))
    first.register_forward_pre_hook(_first_input(lambda hidden: _cut(hidden, group)), with_kwargs=True, prepend=True)
    last.register_forward_hook(_first_output(lambda hidden: gathered(hidden, TOKENS, group)))
    for name in region.gathering:
        module = model.get_submodule(name)
        gather = _first_input(lambda hidden: gathered(hidden, TOKENS, group))
        module.register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
    for name, module in model.named_modules():
        is_alone = _is_in(f"{name}.", region.blocks) and not _is_in(f"{name}.", region.gathering)
        if is_alone and name not in region.styles and any(one is not None for one in module._parameters.values()):
            sum_gradients(module, group)


def _cut(hidden: torch.Tensor, group: dist.ProcessGroup) -> Any:
    if hidden.ndim < 3 or hidden.shape[TOKENS] % group.size():
        raise InvalidArgument(
            f"sequence_parallel=True: blocks got a tensor of shape {tuple(hidden.shape)}; expected (batch, tokens, "
            f"features) with tokens that are divisible by tp_size={group.size()}. Pad the sequences"
        )
    return own_part(hidden, TOKENS, group)


def _first_input(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    return hook


def _first_output(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook
