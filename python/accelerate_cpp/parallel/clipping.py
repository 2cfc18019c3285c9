"""Clipping gradients by their joint norm in one pass over their memory, and a second one only where it clips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from accelerate_cpp._native import measure_gradients, scale_gradients

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _is_ours(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and gradient.device.type == "cpu" and gradient.dtype in _FLOATING


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    known_squares: Mapping[int, float] | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm``.

    Gradients on the CPU are measured in double precision by the 2-norm; others, and other norms, are torch's to clip.
    As there, a norm that is not finite makes all gradients NaN or zero.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: positive.
        norm_type: as in ``torch.nn.utils.clip_grad_norm_``.
        known_squares: sums of the squares of gradients that have just been measured, by ``id`` of their parameters.

    Returns:
        The norm before, 0-dim.
    """
    tensors = list(parameters)
    by_parameter = {id(parameter): parameter.grad for parameter in tensors if parameter.grad is not None}
    gradients = list(by_parameter.values())
    if float(norm_type) != 2.0 or not gradients or not all(_is_ours(gradient) for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=norm_type)
    known = known_squares or {}
    unknown = [gradient for parameter, gradient in by_parameter.items() if parameter not in known]
    measured = sum(squares for squares, _ in measure_gradients(unknown))
    norm = math.sqrt(measured + sum(known[parameter] for parameter in by_parameter if parameter in known))
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1.0:
        scale_gradients(gradients, factor)
    return torch.tensor(norm, dtype=gradients[0].dtype)
