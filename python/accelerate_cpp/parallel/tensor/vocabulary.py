"""Loss parallelism: logits of which each process has those of its part of the vocabulary, and their cross entropy.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3
(arXiv:1909.08053): of each token the processes exchange a few numbers instead of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.tensor.exchanges import gathered

__all__ = ["SplitLogits", "split_cross_entropy"]


class SplitLogits(torch.Tensor):
    """Logits as a whole for whoever looks at them, of which this process has those of its part of the vocabulary.

    The vocabulary is the last dimension. Operations that treat elements alone, and views and slices of the other
    dimensions, give such logits again; ``cross_entropy`` with labels is computed by all processes together; anything
    else gathers the whole first, so that all processes of the group have to do it, and gives ordinary tensors. What is
    written into them is written into the whole, which they are from then on; views that were taken before do not see
    it. ``torch.distributed``, ``torch.vmap``, ``torch.tensor`` and functions of autograd of a program's own know
    nothing of that: give them :meth:`whole`. Hooks, as of ``fully_shard``, get the gradient of this process's part.
    """

    _group: dist.ProcessGroup
    _written: Tensor | None = None
    """The whole, after something was written into it."""

    @staticmethod
    def of(part: Tensor, group: dist.ProcessGroup) -> SplitLogits:
        """The logits of all processes of ``group``, of which ``part`` is this one's; all parts are equally large."""
        logits = part.as_subclass(SplitLogits)
        logits._group = group
        return logits

    def part(self) -> Tensor:
        """Those of this process, an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def whole(self) -> Tensor:
        """Those of all processes, an ordinary tensor. Collective; gradients flow back to each process's part."""
        return gathered(self.part(), -1, self._group) if self._written is None else self._written

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in _OWN or _attribute(func) in _ATTRIBUTES:
            return _looked_at(func, args, named)
        if func in _REFUSED or func.__name__ == "__set__" or isinstance(named.get("out"), SplitLogits):
            raise InvalidArgument(
                f"split logits: {func.__name__} would only concern the part of this process; call logits.whole() and "
                "use what it returns, or leave loss_parallel out"
            )
        handler = None if any(one._written is not None for one in _among(args, named)) else _HANDLERS.get(func)
        if handler is not None and args:
            found = handler(func, args, named)
            if found is not None:
                return found
        target = args[0] if args and _writes(func.__name__) else None
        # Whatever it is, it gets ordinary tensors.
        args, named = tree_map_only(SplitLogits, SplitLogits.whole, (args, named))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        if isinstance(target, SplitLogits):
            target._written = args[0]
        return result


class _CrossEntropy(torch.autograd.Function):
    """Of each row: the logarithm of the sum of exponentials, less the logit of its label, and less the mean of all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, labels: Tensor, smoothing: float, group: dist.ProcessGroup) -> Tensor:
        size, begin = part.shape[-1], group.rank() * part.shape[-1]
        largest = part.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = part - largest.unsqueeze(-1)
        places = labels - begin
        here = (places >= 0) & (places < size)
        places = places.clamp(0, size - 1).unsqueeze(-1)
        of_label = torch.where(here, shifted.gather(-1, places).squeeze(-1), 0)
        sums = [shifted.sum(-1)] if smoothing else []
        exponentials = shifted.exp_()
        numbers = torch.stack([exponentials.sum(-1), of_label, *sums])
        dist.all_reduce(numbers, group=group)
        total, of_label, *sums = numbers.unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), places, here)
        ctx.smoothing, ctx.whole = smoothing, size * group.size()
        losses = total.log() - of_label
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total.log() - sums[0] / ctx.whole)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        probabilities, places, here = ctx.saved_tensors
        gradient = probabilities.clone()
        if ctx.smoothing:
            gradient -= ctx.smoothing / ctx.whole
        gradient.scatter_add_(-1, places, -(1 - ctx.smoothing) * here.unsqueeze(-1).to(gradient.dtype))
        return gradient * gradients[0].unsqueeze(-1), None, None, None


def split_cross_entropy(
    part: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits of which each process has a part. Collective.

    Args:
        part: (rows, part of the vocabulary), equally many on all processes; gradients flow to it.
        labels: (rows,), integers, equal on all processes.

    Returns:
        Float32, or float64 for such logits, on all processes; (rows,) with the reduction ``"none"``, else 0-dim.

    Raises:
        IndexError: on the CPU, a label is no number of the vocabulary; as torch does.
        ValueError: there is no such reduction.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    computed = part if part.dtype == torch.float64 else part.float()
    counts = labels != ignore_index
    if labels.device.type == "cpu" and type(labels) is Tensor:  # and not one without values
        outside = labels[counts & ((labels < 0) | (labels >= part.shape[-1] * group.size()))]
        if len(outside):
            raise IndexError(f"Target {outside[0].item()} is out of bounds.")
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        computed, torch.where(counts, labels, 0), label_smoothing, group
    )
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _among(args: Any, kwargs: dict[str, Any]) -> list[SplitLogits]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, SplitLogits)]


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


Handler = Callable[[Any, Any, dict[str, Any]], Any]


def _like(logits: SplitLogits, part: Tensor) -> SplitLogits:
    return SplitLogits.of(part, logits._group)


def _attribute(func: Any) -> str:
    """The name of the attribute that ``func`` gets; empty for another function."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else ""


def _looked_at(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An attribute, or what belongs to the object itself; the shape is that of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if _attribute(func) == "shape":
        return torch.Size([*found[:-1], found[-1] * args[0]._group.size()])
    return found


def _size(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    shape = args[0].shape
    if func is torch.Tensor.numel:
        return shape.numel()
    if func is torch.Tensor.__len__:
        return shape[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _elements(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Treats each element alone; the other operands are numbers."""
    logits, *others = args
    if not isinstance(logits, SplitLogits) or any(isinstance(one, Tensor) for one in (*others, *kwargs.values())):
        return None
    found = func(logits.part(), *others, **kwargs)
    return _like(logits, found)


def _viewed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A view whose last dimension is the vocabulary."""
    logits, *shape = args
    if kwargs or not isinstance(logits, SplitLogits):
        return None
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = list(shape[0])
    if not shape or not all(isinstance(one, int) for one in shape):
        return None
    whole = logits.shape[-1]
    others = logits.shape[:-1].numel()
    given = [one for one in shape[:-1] if one != -1]
    if shape[-1] not in (whole, -1) or (shape[-1] == -1 and torch.Size(given).numel() != others):
        return None
    if shape[-1] == -1 and -1 in shape[:-1]:
        return None
    part = logits.part()
    return _like(logits, getattr(part, func.__name__)(*shape[:-1], part.shape[-1]))


def _flattened(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    begin = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    if not isinstance(logits, SplitLogits) or end % logits.ndim == logits.ndim - 1:
        return None
    return _like(logits, logits.part().flatten(begin, end))


def _sliced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rows and tokens are chosen, by numbers, slices and masks; the vocabulary is not."""
    logits, index = args
    if not isinstance(logits, SplitLogits):
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(one, SplitLogits) or not isinstance(one, (int, slice, Tensor, type(...))) for one in items):
        return None
    masks = (torch.bool, torch.uint8)
    used = sum(one.ndim if isinstance(one, Tensor) and one.dtype in masks else 1 for one in items if one is not ...)
    if ... in [one for one in items if not isinstance(one, Tensor)]:
        position = next(number for number, one in enumerate(items) if one is ...)
        items[position : position + 1] = [slice(None)] * (logits.ndim - used)
        used = logits.ndim
    if used == logits.ndim:
        if not isinstance(items[-1], slice) or items[-1] != slice(None):
            return None
    elif used > logits.ndim:
        return None
    return _like(logits, logits.part()[tuple(items)])


_ORDER = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _cross_entropy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
    logits, labels = given["input"], given["target"]
    old = [given.get(name) for name in ("weight", "size_average", "reduce")]
    if not isinstance(logits, SplitLogits) or isinstance(labels, SplitLogits) or old != [None] * 3:
        return None
    if logits.ndim != 2 or labels.ndim != 1 or labels.is_floating_point():
        return None
    options = {name: given[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in given}
    return split_cross_entropy(logits.part(), labels, logits._group, **options)


_ATTRIBUTES = frozenset(
    {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "_version", "is_cuda"}
    | {"is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "is_mps", "is_xpu", "output_nr", "retains_grad"}
)
# What asks or changes the object itself, not its elements.
_OWN = frozenset(
    {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.get_device}
    | {torch.Tensor.is_contiguous, torch.Tensor._is_view, torch.Tensor.element_size, torch.is_floating_point}
    | {torch.Tensor.register_hook}
)
_REFUSED = frozenset({torch.Tensor.retain_grad, torch.Tensor.requires_grad_})
_ELEMENTWISE = (
    *(torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.to),
    *(torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.cpu, torch.clone),
    *(torch.Tensor.mul, torch.Tensor.div, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.__truediv__),
    *(torch.mul, torch.div, torch.tanh, torch.Tensor.tanh, torch.Tensor.neg, torch.Tensor.__neg__),
)
_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_ELEMENTWISE, _elements),
    **dict.fromkeys((torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__), _size),
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape), _viewed),
    **dict.fromkeys((torch.Tensor.flatten, torch.flatten), _flattened),
    torch.Tensor.__getitem__: _sliced,
    functional.cross_entropy: _cross_entropy,
}
