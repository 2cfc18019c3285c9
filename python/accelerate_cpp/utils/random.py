"""Seeds and states of random generators, in one process and across all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.devices.selection import available_devices
from accelerate_cpp.devices.table import accelerators
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils.operations import broadcast, collective_device, process_index, world_size

__getattr__ = lending("utils.random")

_State = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]


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
    for kind in available_devices():
        kind.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _state_of(rng_type: Any, generator: torch.Generator | None) -> _State:
    """What reads the state of ``rng_type``, and what writes it."""
    name = getattr(rng_type, "value", rng_type)
    if name == "torch":
        return torch.get_rng_state, torch.set_rng_state
    if name == "generator":
        if generator is None:
            raise InvalidArgument("the random type 'generator' needs a torch.Generator to synchronise; none was given")
        return generator.get_state, generator.set_state
    kind = next((kind for kind in accelerators() if kind.type == name), None)
    if kind is None:
        known = ", ".join(("torch", "generator", *(kind.type for kind in accelerators())))
        raise InvalidArgument(f"unknown random type {name!r}: use one of {known}")
    if not kind.is_available():
        raise InvalidArgument(f"random type {name!r} was requested, but torch finds no {name} device")
    return kind.random_state, kind.set_random_state


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Copies the state of rank 0's generator of ``rng_type`` to every rank. A collective.

    Args:
        rng_type: ``"torch"``, ``"generator"`` (then ``generator`` is the one), or a device type such as ``"cuda"``.
    """
    read, write = _state_of(rng_type, generator)
    if world_size() > 1:
        write(broadcast(read().to(collective_device())).cpu())


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
