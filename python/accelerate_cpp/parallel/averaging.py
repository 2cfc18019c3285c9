"""Parameters averaged over the ranks: ranks that step independently share them instead of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist


def average(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces every tensor by its mean over the ranks of the default process group, in place.

    All tensors of one device and dtype, usually all, travel in one coalesced all-reduce. Every rank has to call it with
    tensors of the same shapes and dtypes in the same order.

    Args:
        tensors: dense, of floating-point or complex dtypes.
    """
    together: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            data = tensor.detach()
            real = torch.view_as_real(data) if data.is_complex() else data  # not every backend knows complex numbers
            together[real.device, real.dtype].append(real)
    for alike in together.values():
        _all_reduce(alike)


def _all_reduce(tensors: list[torch.Tensor]) -> None:
    """The call below ``torch.distributed.all_reduce_coalesced``, which warns that it is deprecated."""
    group = dist.distributed_c10d._get_default_group()
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = False
    work = group.allreduce_coalesced(tensors, options)
    if work is not None:  # otherwise the backend has waited itself
        work.wait()


class ParameterAverage:
    """Averages the parameters that a model trains, whenever it is called; every rank has to call it.

    Those are the parameters that require a gradient now, or did when the last average was taken: what has been frozen
    since then was trained until then, by each rank for itself. Parameters that stay frozen are left as they are, which
    saves communication; so are buffers and integers, which have no gradient.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._trained = _trainable_names(model)

    def __call__(self) -> None:
        trainable = _trainable_names(self._model)
        trained = trainable | self._trained
        average(parameter for name, parameter in self._model.named_parameters() if name in trained)
        self._trained = trainable


def _trainable_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
