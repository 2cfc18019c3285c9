"""Seeds and states of random generators, in one process and across all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils.operations import broadcast, collective_device, process_index, world_size

__getattr__ = lending("utils.random")

_DEVICE_TYPES = ("cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds ``random``, NumPy and torch (CPU and all accelerators).

    Args:
        device_specific: add the rank to the seed, so that ranks draw different numbers.
        deterministic: make torch use deterministic algorithms, and raise if there is none.
    """
    if device_specific:
        seed += process_index()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _source(rng_type: Any, generator: torch.Generator | None) -> tuple[Any, str, str]:
    """The object with the state of ``rng_type``, and the names of its methods that read and write it."""
    kind = getattr(rng_type, "value", rng_type)
    if kind == "torch":
        return torch, "get_rng_state", "set_rng_state"
    if kind == "generator":
        if generator is None:
            raise InvalidArgument("the random type 'generator' needs a torch.Generator to synchronise; none was given")
        return generator, "get_state", "set_state"
    if kind not in _DEVICE_TYPES:
        raise InvalidArgument(
            f"unknown random type {kind!r}: use one of {', '.join(('torch', 'generator', *_DEVICE_TYPES))}"
        )
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise InvalidArgument(f"random type {kind!r} was requested, but torch finds no {kind} device")
    return module, "get_rng_state", "set_rng_state"


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Copies the state of rank 0's generator of ``rng_type`` to every rank. A collective.

    Args:
        rng_type: ``"torch"``, ``"generator"`` (then ``generator`` is the one), or a device type such as ``"cuda"``.
    """
    holder, read, write = _source(rng_type, generator)
    if world_size() == 1:
        return
    state: torch.Tensor = getattr(holder, read)()
    getattr(holder, write)(broadcast(state.to(collective_device())).cpu())


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """Calls :func:`synchronize_rng_state` for each of ``rng_types``.

    Example:
        >>> import torch
        >>> from accelerate_cpp import PartialState, debug_launcher, synchronize_rng_states
        >>> def work():
        ...     torch.manual_seed(PartialState().process_index)
        ...     synchronize_rng_states(["torch"])
        ...     return torch.rand(1).item()
        >>> first, second = debug_launcher(work, num_processes=2)
        >>> first == second
        True
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)
