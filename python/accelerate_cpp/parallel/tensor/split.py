"""Splits the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from accelerate_cpp.parallel.tensor.exchanges import SharedInput
from accelerate_cpp.parallel.tensor.plans import Plan, tell_heads
from accelerate_cpp.parallel.tensor.sequences import region_of, split_tokens
from accelerate_cpp.parallel.tensor.styles import COLUMNS_OF_LOGITS, GATHERED, split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_layers(
    model: nn.Module,
    plan: Plan,
    cuts_sequences: bool,
    mesh: DeviceMesh,
    bring: Callable[[Iterable[torch.Tensor]], None],
    splits_logits: bool = False,
) -> None:
    """Splits layers of ``model`` in place: their parameters become ``DTensor`` s.

    Args:
        plan: how.
        cuts_sequences: whether each process computes for its part of the tokens what lies between split layers.
        mesh: of one dimension, the processes that split layers.
        bring: gives tensors the values that all processes start from; called for one layer after the other, so that no
            process needs more than one whole layer that it has not been given.
        splits_logits: whether layers whose outputs would be gathered give such that are gathered only where they have
            to be; a loss of them is computed by all processes together.

    Raises:
        InvalidArgument: see :func:`accelerate_cpp.parallel.tensor.sequences.region_of`.
    """
    region = region_of(model, plan.styles) if cuts_sequences else None
    shared = SharedInput(mesh.get_group())
    for name, style in (plan if region is None else region).styles.items():
        module = model.get_submodule(name)
        if splits_logits and style in GATHERED:
            style = COLUMNS_OF_LOGITS
        bring([*module.parameters(), *module.buffers()])
        split(module, style, mesh, shared)
    for name in plan.attention:
        tell_heads(model.get_submodule(name), mesh.size())
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its shortcut in evaluation takes its layers apart
    if region is not None:
        split_tokens(model, region, mesh.get_group())
