"""Clipping gradients by their joint norm: at most one pass over their memory if the reduction has measured them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from accelerate_cpp._native import known_device_statistics, known_statistics, measure_gradients

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

# A sum of squares, or a factor: a number, or a tensor of one on the device of the gradient.
Figure = float | torch.Tensor


def _is_ours(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and gradient.device.type == "cpu" and gradient.dtype in _FLOATING


def _multiply_by_tensor(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies by a factor that the host does not know.

    For narrow dtypes it is a float32, not rounded to them; but for bf16 on accelerators, where torch has no such
    operation, it is rounded as in ``torch.nn.utils.clip_grad_norm_``.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, group in by_dtype.items():
        if dtype in _NARROW and (dtype is not torch.bfloat16 or factor.device.type == "cpu"):
            ignored = torch.zeros((), dtype=torch.float32, device=factor.device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, ignored, factor.to(torch.float32))
        else:
            torch._foreach_mul_(group, factor.to(dtype.to_real()))


def _by_factor(factors: Mapping[int, Figure]) -> list[tuple[Figure, list[int]]]:
    """The factors, and the keys that have each; tensors are not compared, which would wait for them."""
    groups: dict[tuple[bool, float], tuple[Figure, list[int]]] = {}
    for key, factor in factors.items():
        name = (True, id(factor)) if isinstance(factor, torch.Tensor) else (False, factor)
        groups.setdefault(name, (factor, []))[1].append(key)
    return list(groups.values())


def _multiply(gradients: Mapping[int, torch.Tensor], factors: Mapping[int, Figure]) -> None:
    """Multiplies each gradient by its factor, in place, those with equal factors at once."""
    for factor, keys in _by_factor(factors):
        group = [gradients[key] for key in keys]
        if isinstance(factor, torch.Tensor):
            _multiply_by_tensor(group, factor)
        elif factor != 1.0:
            torch._foreach_mul_(group, factor)


def _look_up(parameters: Iterable[torch.Tensor], known: dict[int, tuple[Figure, Figure]]) -> None:
    """Adds to ``known`` what reductions have measured; before Python sees the gradients."""
    unknown = [parameter for parameter in parameters if id(parameter) not in known]
    rows = []
    for parameter, numbers, row in zip(
        unknown, known_statistics(unknown), known_device_statistics(unknown), strict=True
    ):
        if numbers is not None:
            known[id(parameter)] = (numbers[0], 1.0)
        elif row is not None:
            rows.append((parameter, row))
    for device in {parameter.device for parameter, _ in rows}:
        there = [(parameter, row) for parameter, row in rows if parameter.device == device]
        for (parameter, _), squares in zip(there, torch.stack([row for _, row in there])[:, 0].unbind(), strict=True):
            known[id(parameter)] = (squares, 1.0)


def _clip_on_device(
    gradients: Mapping[int, torch.Tensor], known: Mapping[int, tuple[Figure, Figure]], max_norm: float
) -> torch.Tensor:
    """Clips dense gradients of one device, of which some are known there, without waiting for it."""
    by_factor = _by_factor({key: known[key][1] for key in gradients if key in known})
    sums = [
        torch.stack([torch.as_tensor(known[key][0]) for key in keys]).sum() * factor * factor
        for factor, keys in by_factor
    ]
    left = [gradient for key, gradient in gradients.items() if key not in known]
    if left:
        sums.append(torch.nn.utils.get_total_norm(left).to(sums[0].dtype).square())
    norm = torch.stack(sums).sum().sqrt()
    ratio = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for factor, keys in by_factor:
        _multiply_by_tensor([gradients[key] for key in keys], ratio * factor)
    _multiply_by_tensor(left, ratio)
    return norm.to(next(iter(gradients.values())).dtype.to_real())


def _clip_on_host(
    gradients: Mapping[int, torch.Tensor], known: Mapping[int, tuple[Figure, Figure]], max_norm: float
) -> torch.Tensor:
    """Clips gradients of the CPU, those that are not known after measuring them."""
    left = [key for key in gradients if key not in known]
    measured = measure_gradients([gradients[key] for key in left])
    figures = {**known, **{key: (squares, 1.0) for key, (squares, _) in zip(left, measured, strict=True)}}
    factors = {key: float(figures[key][1]) for key in gradients}
    norm = math.sqrt(sum(float(figures[key][0]) * factors[key] ** 2 for key in gradients))
    ratio = float(max_norm) / (norm + 1e-6)
    _multiply(gradients, factors if ratio >= 1.0 else {key: factor * ratio for key, factor in factors.items()})
    return torch.tensor(norm, dtype=next(iter(gradients.values())).dtype)


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    measured: Mapping[int, tuple[Figure, Figure]] | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm``.

    Gradients on the CPU are measured in double precision by the 2-norm. On one accelerator, what their reduction has
    measured is used there, and the host waits for nothing; others, and other norms, are torch's to clip. As there, a
    norm that is not finite makes all gradients NaN or zero.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: positive.
        norm_type: as in ``torch.nn.utils.clip_grad_norm_``.
        measured: by ``id`` of parameters, the sums of the squares of their gradients as they are, and factors by which
            these gradients have still to be multiplied.

    Returns:
        The norm before clipping (of the gradients multiplied by their factors), 0-dim, on the device of the gradients.
    """
    tensors = list({id(parameter): parameter for parameter in parameters}.values())
    known = dict(measured or {})
    _look_up(tensors, known)
    gradients = {id(parameter): parameter.grad for parameter in tensors if parameter.grad is not None}
    euclidean = float(norm_type) == 2.0 and len(gradients) > 0
    on_device = any(isinstance(known[key][0], torch.Tensor) for key in gradients if key in known)
    if euclidean and on_device and _are_dense_on_one_device(gradients.values()):
        return _clip_on_device(gradients, known, max_norm)
    if euclidean and not on_device and all(map(_is_ours, gradients.values())):
        return _clip_on_host(gradients, known, max_norm)
    _multiply(gradients, {key: known[key][1] if key in known else 1.0 for key in gradients})
    norm = torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=norm_type)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of gradients in shards
    return whole


def _are_dense_on_one_device(gradients: Iterable[torch.Tensor]) -> bool:
    kinds = {(type(gradient), gradient.layout, gradient.device) for gradient in gradients}
    return len(kinds) == 1 and next(iter(kinds))[:2] == (torch.Tensor, torch.strided)
