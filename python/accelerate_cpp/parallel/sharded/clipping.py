"""Clipping gradients of which each process has a shard, in one pass over the memory of the shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp._native import measure_gradients
from accelerate_cpp.devices.shards import is_sharded_tensor, local_part
from accelerate_cpp.errors import InvalidArgument

Figure = float | torch.Tensor


def clip_shards(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    measured: Mapping[int, tuple[Figure, Figure]] | None = None,
    groups: Mapping[int, dist.ProcessGroup] | None = None,
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[int] = (),
) -> torch.Tensor:
    """Scales gradients in place to a joint norm of at most ``max_norm``; each may be in shards over a mesh of its own.

    A collective of the processes of the meshes, which must call it with the same parameters.

    Args:
        parameters: those without a gradient are skipped.
        norm_type: as in ``torch.nn.utils.clip_grad_norm_``.
        measured: by ``id`` of parameters, the sums of the squares of what this process has of their gradients, and
            factors by which these have still to be multiplied.
        groups: by ``id`` of parameters that are no ``DTensor`` s, but parts, the processes that have the parts; some of
            these may have no gradient.
        stages: the processes that have the other parameters of the model; all of them call this.
        counted_elsewhere: the ``id`` s of parameters that one of these has, too, and counts.

    Returns:
        The norm before clipping, 0-dim, on the device of the gradients. Where it is not finite, all gradients become
        NaN or zero, as with torch's function.

    Raises:
        InvalidArgument: ``norm_type`` is not positive.
    """
    power = float(norm_type)
    if not power > 0:
        raise InvalidArgument(f"clip_grad_norm_: norm_type={norm_type!r}; expected a positive number or 'inf'")
    known, flat = dict(measured or {}), groups or {}
    given = list({id(one): one for one in parameters}.values())
    with_gradient = [one for one in given if one.grad is not None]
    if stages is None and not with_gradient and not any(id(one) in flat for one in given):
        return torch.tensor(0.0)
    for parameter in with_gradient:
        _add_up(parameter, known)
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for parameter in given:
        if id(parameter) in flat:
            by_layout.setdefault(flat[id(parameter)], [])  # also where this process has no part
        if parameter.grad is not None and id(parameter) not in counted_elsewhere:
            by_layout.setdefault(flat.get(id(parameter)) or _layout(parameter.grad), []).append(parameter)
    samples: list[Any] = [*(one.grad for one in with_gradient), *given, torch.tensor(0.0)]
    sample = local_part(samples[0])
    parts = []
    for layout, group in by_layout.items():
        part = torch.tensor(_joint(group, power, known), dtype=torch.float64, device=sample.device)
        for process_group in _groups(layout):
            dist.all_reduce(part, op=dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM, group=process_group)
        parts.append(part.item())
    norm = max(parts, default=0.0) if math.isinf(power) else sum(parts)
    if stages is not None:
        together = torch.tensor(norm, dtype=torch.float64, device=sample.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM, group=stages)
        norm = together.item()
    norm = norm if math.isinf(power) else norm ** (1.0 / power)
    ratio = min(float(max_norm) / (norm + 1e-6), 1.0) if norm == norm else math.nan
    factors = {id(one): float(known[id(one)][1]) if id(one) in known else 1.0 for one in with_gradient}
    for factor in set(factors.values()):
        if factor * ratio != 1.0:
            scaled = [local_part(one.grad) for one in with_gradient if factors[id(one)] == factor]  # type: ignore[arg-type]
            torch._foreach_mul_(scaled, factor * ratio)
    return torch.tensor(norm, dtype=sample.dtype, device=sample.device)


def _add_up(parameter: Any, known: dict[int, tuple[Figure, Figure]]) -> None:
    """Replaces a gradient of which each process has one summand, as layouts of ``DTensor`` leave some, by the sum."""
    gradient = parameter.grad
    if not is_sharded_tensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return
    if id(parameter) in known:  # the squares of the summand
        local_part(gradient).mul_(known.pop(id(parameter))[1])
    parameter.grad = gradient.redistribute(placements=parameter.placements)


def _layout(gradient: Any) -> Any:
    """What the process groups depend on, over which the parts of ``gradient`` are added up."""
    return (gradient.device_mesh, gradient.placements) if is_sharded_tensor(gradient) else None


def _groups(layout: Any) -> list[Any]:
    if layout is None:
        return []
    if isinstance(layout, dist.ProcessGroup):
        return [layout]
    mesh, placements = layout
    return [mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate()]


def _joint(parameters: list[torch.Tensor], power: float, known: Mapping[int, tuple[Figure, Figure]]) -> float:
    """The sum of the powers of the elements that this process has, or their maximum, with factors multiplied in."""
    locals_of = {id(one): local_part(one.grad) for one in parameters}  # type: ignore[arg-type]
    if power == 2.0:
        left = [key for key in locals_of if key not in known]
        on_cpu = all(locals_of[key].device.type == "cpu" for key in left)
        squares = (
            [figures[0] for figures in measure_gradients([locals_of[key] for key in left])]
            if on_cpu
            else [float(torch.linalg.vector_norm(locals_of[key], dtype=torch.float32)) ** 2 for key in left]
        )
        given = [float(known[key][0]) * float(known[key][1]) ** 2 for key in locals_of if key in known]
        return math.fsum([*squares, *given])
    norms = []
    for key, local in locals_of.items():
        factor = float(known[key][1]) if key in known else 1.0
        norms.append(float(torch.linalg.vector_norm(local.float(), power)) * factor if local.numel() else 0.0)
    return max(norms, default=0.0) if math.isinf(power) else math.fsum(norm**power for norm in norms)
