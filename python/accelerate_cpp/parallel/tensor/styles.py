"""The ways to split a layer, by the names that Transformers' plans have for them.

A layer that is split by its outputs, followed by one that is split by its inputs, communicates once in each direction
(Shoeybi et al. 2019, arXiv:1909.08053). Parameters are ``DTensor`` s, as optimizers, checkpoints and ``fully_shard``
know them; layers compute with the parts, since each operation on a ``DTensor`` passes through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.tensor.exchanges import (
    SharedInput,
    gathered,
    own_part,
    part_of,
    summed,
    with_summed_gradients,
)
from accelerate_cpp.parallel.tensor.vocabulary import SplitLogits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLUMNS, ROWS, GATHERED_COLUMNS = "colwise", "rowwise", "colwise_gather_output"
COLUMNS_OF_LOGITS = "colwise, of logits"
"""As ``GATHERED_COLUMNS``, but gathered only where the whole is needed, which a loss does not."""
SUMMED = "replicated_with_grad_allreduce"
"""Every process has the whole, and computes with it on its part of the heads."""
COLUMNS_OF_TOKENS, ROWS_OF_TOKENS = "colwise, of tokens", "rowwise, of tokens"
"""Between them, each process has its part of the tokens."""
TOKENS = 1
"""The dimension of tokens in what blocks compute with: (batch, tokens, features)."""

_WHOLE = "replicate"
GATHERED = (GATHERED_COLUMNS, "colwise_rep")
_BY_OUTPUTS = (COLUMNS, *GATHERED, "embedding_colwise")
_BY_INPUTS = (ROWS, "rowwise_rep", "rowwise_split_input")
_BY_ENTRIES = ("embedding_rowwise",)
NAMES = (*_BY_OUTPUTS, *_BY_INPUTS, *_BY_ENTRIES, SUMMED, _WHOLE)


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes the gradients of the parameters of ``module`` the sums over ``group``, as each process uses it in part.

    In each pass by itself, so that what accumulates is right, and whoever has replaced the parameters meanwhile.
    """
    compute: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: one for name, one in module._parameters.items() if one is not None}
        for name, parameter in parameters.items():
            del module._parameters[name]
            module.__dict__[name] = with_summed_gradients(parameter, group)
        try:
            return compute(*args, **kwargs)
        finally:
            for name, parameter in parameters.items():
                del module.__dict__[name]
                module._parameters[name] = parameter

    module.forward = forward


def split(module: nn.Module, style: Any, mesh: DeviceMesh, shared: SharedInput) -> None:
    """Splits ``module`` over ``mesh``, of one dimension; all of its processes have the same values before.

    Args:
        style: one of :data:`NAMES`, of tokens, or a ``ParallelStyle`` of torch.
        shared: for all layers of a model.
    """
    if style == _WHOLE:
        return
    if style == SUMMED:
        sum_gradients(module, mesh.get_group())
    elif isinstance(module, nn.Linear) and isinstance(style, str):
        by_outputs = style in (*_BY_OUTPUTS, COLUMNS_OF_TOKENS, COLUMNS_OF_LOGITS)
        _distribute(module, mesh, 0 if by_outputs else 1)
        group = mesh.get_group()
        compute = _columns(module, style, group, shared) if by_outputs else _rows(module, style, group)
        module.forward = compute  # type: ignore[method-assign,assignment]
    else:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh, _of_embedding(style) if isinstance(style, str) else style, src_data_rank=None)


def _of_embedding(style: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    by_entries = style in (*_BY_ENTRIES, *_BY_INPUTS)
    return RowwiseParallel(input_layouts=Replicate()) if by_entries else ColwiseParallel(output_layouts=Replicate())


def _distribute(module: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    """The weight is split along ``dim``, and the bias with the outputs."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    bias: Any = Shard(0) if dim == 0 else Replicate()
    for name, placement in (("weight", Shard(dim)), ("bias", bias)):
        whole = module._parameters[name]
        if whole is not None:
            part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
            module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


def _columns(
    module: nn.Linear, style: str, group: dist.ProcessGroup, shared: SharedInput
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        of_tokens = style == COLUMNS_OF_TOKENS
        inputs = gathered(inputs, TOKENS, group, adds_gradients=True) if of_tokens else shared(inputs)
        outputs = functional.linear(inputs, part_of(module.weight), part_of(module.bias))
        if style == COLUMNS_OF_LOGITS and outputs.requires_grad and not torch.compiler.is_compiling():
            return SplitLogits.of(outputs, group)
        return outputs if style in (COLUMNS, COLUMNS_OF_TOKENS) else gathered(outputs, -1, group)

    return forward


def _rows(module: nn.Linear, style: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        of_tokens = style == ROWS_OF_TOKENS
        if style not in (ROWS, ROWS_OF_TOKENS):
            inputs = own_part(inputs, -1, group)
        outputs = functional.linear(inputs, part_of(module.weight))
        outputs = own_part(outputs, TOKENS, group, adds=True) if of_tokens else summed(outputs, group)
        bias: Any = part_of(module.bias)
        if bias is None:
            return outputs
        return outputs + (with_summed_gradients(bias, group) if of_tokens else bias).to(outputs.dtype)

    return forward


def require_fit(name: str, module: nn.Module, style: Any, processes: int) -> None:
    """Refuses to split ``module`` where that gives unequal parts, or is no such layer.

    Raises:
        InvalidArgument: the style is not known, the module is neither ``nn.Linear`` nor ``nn.Embedding``, or the
            dimension that is split is not divisible by ``processes``.
    """
    if not isinstance(style, str) or style in (SUMMED, _WHOLE):
        return
    if style not in NAMES:
        raise InvalidArgument(
            f"tensor parallelism: the plan splits {name!r} by {style!r}, and expected is one of {', '.join(NAMES)} or "
            "a ParallelStyle of torch; load a model of transformers with tp_plan='auto' to split it by its own code"
        )
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise InvalidArgument(
            f"tensor parallelism: the plan splits {name!r}, a {type(module).__name__}; only nn.Linear and nn.Embedding "
            "can be split by name. Give a ParallelStyle of torch for it, or leave it out of the plan"
        )
    what, size = _split_dimension(module, style)
    if size % processes:
        raise InvalidArgument(
            f"tensor parallelism: {name!r} has {what}={size}, which is not divisible by tp_size={processes}; choose "
            "another tp_size, or leave the layer out of the plan"
        )


def _split_dimension(module: nn.Linear | nn.Embedding, style: str) -> tuple[str, int]:
    if isinstance(module, nn.Embedding):
        by_entries = style in (*_BY_ENTRIES, *_BY_INPUTS)
        return ("num_embeddings", module.num_embeddings) if by_entries else ("embedding_dim", module.embedding_dim)
    return ("out_features", module.out_features) if style in _BY_OUTPUTS else ("in_features", module.in_features)
