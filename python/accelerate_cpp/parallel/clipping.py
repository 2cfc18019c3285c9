"""Clipping gradients by their joint norm: at most one pass over their memory where the reduction has measured them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from accelerate_cpp._native import known_statistics, measure_gradients

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _is_ours(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and gradient.device.type == "cpu" and gradient.dtype in _FLOATING


def _multiply(gradients: Mapping[int, torch.Tensor], factors: Mapping[int, float]) -> None:
    """Multiplies each gradient by its factor, in place, those with equal factors at once."""
    by_factor: dict[float, list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        by_factor.setdefault(factors[key], []).append(gradient)
    for factor, group in by_factor.items():
        if factor != 1.0:
            torch._foreach_mul_(group, factor)


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    measured: Mapping[int, tuple[float, float]] | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm``.

    Gradients on the CPU are measured in double precision by the 2-norm; others, and other norms, are torch's to clip.
    As there, a norm that is not finite makes all gradients NaN or zero.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: positive.
        norm_type: as in ``torch.nn.utils.clip_grad_norm_``.
        measured: by ``id`` of parameters, the sums of the squares of their gradients as they are, and factors by which
            these gradients have still to be multiplied.

    Returns:
        The norm before clipping (of the gradients multiplied by their factors), 0-dim.
    """
    tensors = list({id(parameter): parameter for parameter in parameters}.values())
    known = dict(measured or {})
    unknown = [parameter for parameter in tensors if id(parameter) not in known]
    for parameter, statistics in zip(unknown, known_statistics(unknown), strict=True):  # before Python sees gradients
        if statistics is not None:
            known[id(parameter)] = (statistics[0], 1.0)
    gradients = {id(parameter): parameter.grad for parameter in tensors if parameter.grad is not None}
    factors = {key: known[key][1] if key in known else 1.0 for key in gradients}
    if float(norm_type) != 2.0 or not gradients or not all(map(_is_ours, gradients.values())):
        _multiply(gradients, factors)
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=norm_type)
    left = [key for key in gradients if key not in known]
    for key, (squares, _) in zip(left, measure_gradients([gradients[key] for key in left]), strict=True):
        known[key] = (squares, 1.0)
    norm = math.sqrt(sum(known[key][0] * factors[key] ** 2 for key in gradients))
    ratio = float(max_norm) / (norm + 1e-6)
    _multiply(gradients, factors if ratio >= 1.0 else {key: factor * ratio for key, factor in factors.items()})
    return torch.tensor(norm, dtype=next(iter(gradients.values())).dtype)
