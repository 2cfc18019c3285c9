"""The ways to split a layer, by the names that Transformers' plans have for them.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
(arXiv:1909.08053): a layer split by its outputs, then one split by its inputs, communicate once between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLUMNS, ROWS, GATHERED_COLUMNS = "colwise", "rowwise", "colwise_gather_output"
SUMMED = "replicated_with_grad_allreduce"
"""Every process has the whole, and computes with it on its part of the heads."""

_WHOLE = "replicate"
_BY_OUTPUTS = (COLUMNS, GATHERED_COLUMNS, "colwise_rep", "embedding_colwise")
_BY_INPUTS = (ROWS, "rowwise_rep", "rowwise_split_input")
_BY_ENTRIES = ("embedding_rowwise",)
NAMES = (*_BY_OUTPUTS, *_BY_INPUTS, *_BY_ENTRIES, SUMMED, _WHOLE)


class _SumOfGradients(torch.autograd.Function):
    """The identity; its gradient is the sum of those of all processes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes the gradients of the parameters of ``module`` the sums over ``group``, as each process uses it in part.

    In each pass by itself, so that what accumulates is right, and whoever has replaced the parameters meanwhile.
    """
    compute: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: one for name, one in module._parameters.items() if one is not None}
        for name, parameter in parameters.items():
            del module._parameters[name]
            module.__dict__[name] = _SumOfGradients.apply(parameter, group)  # type: ignore[no-untyped-call]
        try:
            return compute(*args, **kwargs)
        finally:
            for name, parameter in parameters.items():
                del module.__dict__[name]
                module._parameters[name] = parameter

    module.forward = forward


def split(module: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    """Splits ``module`` over ``mesh``, of one dimension; all of its processes have the same values before.

    Args:
        style: one of :data:`NAMES`, or a ``ParallelStyle`` of torch.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if style == _WHOLE:
        return
    if style == SUMMED:
        sum_gradients(module, mesh.get_group())
        return
    ways: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(_BY_OUTPUTS[1:], lambda: ColwiseParallel(output_layouts=Replicate())),
        **dict.fromkeys((*_BY_INPUTS[1:], *_BY_ENTRIES), lambda: RowwiseParallel(input_layouts=Replicate())),
        COLUMNS: ColwiseParallel,
        ROWS: RowwiseParallel,
    }
    way = ways[style]() if isinstance(style, str) else style
    parallelize_module(module, mesh, way, src_data_rank=None)


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
