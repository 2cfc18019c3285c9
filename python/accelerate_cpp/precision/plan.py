"""The dtypes in which parameters of a model are stored, computed, reduced and stepped: a plan that can be printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from accelerate_cpp.precision import fp8_torchao, fp8_transformer_engine
from accelerate_cpp.precision.precision import Precision

# Layers all of whose operations torch.autocast converts, and such whose operations it leaves alone on the CPU. Of the
# latter, other devices normalize in fp32.
_CONVERTED = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.PReLU,
)
_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_NORMALIZING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@dataclass(frozen=True)
class PlannedGroup:
    """Parameters of one kind of layer that are treated alike.

    Attributes:
        layer: the class of the layers that hold them.
        names: of the parameters, as in the model's ``state_dict()``.
        num_elements: of all of them.
        storage_dtype: of the parameters, which is that of their gradients.
        compute_dtype: the dtype in which operations read them; ``None`` if ``torch.autocast`` decides for each
            operation of a layer that is not one of torch's own.
        reduce_dtype: in which their gradients travel between the processes; ``None`` if they do not.
        master_dtype: of what the optimizer steps on; ``None`` if no prepared optimizer steps on them.
    """

    layer: str
    names: tuple[str, ...]
    num_elements: int
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    master_dtype: torch.dtype | None


@dataclass(frozen=True)
class PrecisionPlan:
    """The precision of every parameter of a model. Prints as a table.

    Attributes:
        precision: ``mixed_precision`` of the run.
        device_type: as in ``torch.device.type``.
        groups: each parameter is in one of them, a shared one under its first name.
    """

    precision: str
    device_type: str
    groups: tuple[PlannedGroup, ...]

    def __str__(self) -> str:
        rows = [_HEADINGS, *map(_cells, self.groups)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        return "\n".join([f"mixed_precision={self.precision!r} on {self.device_type}", *lines])


_HEADINGS: tuple[str, ...] = ("layer", "parameters", "elements", "storage", "compute", "reduce", "master")
_NUMBERS = ("parameters", "elements")


def _cells(group: PlannedGroup) -> tuple[str, ...]:
    dtypes = (group.storage_dtype, group.compute_dtype or "per operation", group.reduce_dtype, group.master_dtype)
    return (
        group.layer,
        str(len(group.names)),
        f"{group.num_elements:,}",
        *("-" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes),
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for heading, cell, width in zip(_HEADINGS, row, widths, strict=True):
        yield cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)


def plan_for(
    model: nn.Module,
    precision: Precision,
    *,
    casts: bool,
    on_the_way: Callable[[nn.Parameter], tuple[torch.dtype | None, torch.dtype | None]],
    master_dtypes: Mapping[torch.Tensor, torch.dtype],
) -> PrecisionPlan:
    """The plan of ``model``.

    Args:
        model: the module that the user gave to ``prepare``, without what distributes it.
        precision: of its forward pass.
        casts: whether ``torch.autocast`` is on in its forward pass.
        on_the_way: the dtypes in which a parameter is gathered from other processes before operations read it, and in
            which its gradient is reduced over them; ``None`` where that does not happen.
        master_dtypes: of what optimizers step on, for each parameter that one steps on.
    """
    groups: dict[PlannedGroup, PlannedGroup] = {}  # by what they have in common, without parameters
    seen: set[torch.Tensor] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            gathered, reduced = on_the_way(parameter)
            common = PlannedGroup(
                layer=type(module).__name__,
                names=(),
                num_elements=0,
                storage_dtype=parameter.dtype,
                compute_dtype=_compute_dtype(module, name, gathered or parameter.dtype, precision if casts else None),
                reduce_dtype=reduced,
                master_dtype=master_dtypes.get(parameter) if parameter.requires_grad else None,
            )
            group = groups.get(common, common)
            groups[common] = replace(
                group,
                names=(*group.names, f"{prefix}.{name}" if prefix else name),
                num_elements=group.num_elements + parameter.numel(),
            )
    return PrecisionPlan(precision.name, precision.device_type, tuple(groups.values()))


def _compute_dtype(
    module: nn.Module, name: str, storage: torch.dtype, precision: Precision | None
) -> torch.dtype | None:
    """In what operations of ``module`` read its parameter ``name``; ``precision`` is ``None`` where nothing is cast."""
    in_fp8 = fp8_torchao.weight_dtype(module) or fp8_transformer_engine.weight_dtype(module)
    if in_fp8 is not None and name == "weight":
        return in_fp8
    low = None if precision is None else precision.compute_dtype
    if precision is None or low is None or storage not in _CASTABLE:
        return storage
    if in_fp8 is not None:
        return low
    if not getattr(type(module).forward, "__module__", "").startswith("torch.nn."):
        return None
    if isinstance(module, _CONVERTED):
        return low
    if isinstance(module, _LOOKED_UP):
        return storage
    if isinstance(module, _NORMALIZING) and (precision.device_type == "cpu" or storage == torch.float32):
        return storage
    return None
