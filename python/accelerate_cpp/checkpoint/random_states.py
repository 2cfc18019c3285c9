"""The states of random generators, under the original's names."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from accelerate_cpp.data.order import check_generator_state
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.selection import available_devices
from accelerate_cpp.errors import CheckpointError


def _kinds() -> dict[str, Device]:
    """The available kinds of devices, by the names of their entries."""
    return {kind.random_state_key: kind for kind in available_devices()}


def random_states(step: int) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and ``step``, the micro-batches since a forced sync."""
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    return states | {name: kind.to_checkpoint(kind.random_states()) for name, kind in _kinds().items()}


def check_random_states(states: Mapping[str, Any], source: str) -> list[str]:
    """Describes the generators that :func:`restore_random_states` will not change, for lack of a state or a device.

    Raises:
        CheckpointError: a state does not have the form that a generator needs; ``source`` is its origin, for the
            message.
    """
    kinds, left = _kinds(), []
    for name, check in _CHECKS.items():
        _require_form(name, states, source, check)
    for name, kind in kinds.items():
        own = kind.random_states()
        _require_form(name, states, source, partial(_check_of_devices, kind, own))
        if name in states and len(kind.from_checkpoint(states[name])) != len(own):
            number = len(kind.from_checkpoint(states[name]))
            left.append(f"{name!r} of {number} devices for {len(own)} devices here")
    return [repr(name) for name in (*_CHECKS, *kinds) if name not in states] + left


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Continues from what :func:`random_states` returned and :func:`check_random_states` accepts.

    Devices without a saved state keep theirs.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "random_state": random.setstate,
        "numpy_random_seed": np.random.set_state,
        "torch_manual_seed": torch.set_rng_state,
    }
    for name, restore in setters.items():
        if name in states:
            restore(states[name])
    for name, kind in _kinds().items():
        if name in states:
            kind.set_random_states(kind.from_checkpoint(states[name])[: len(kind.random_states())])


def _check_of_devices(kind: Device, own: Sequence[torch.Tensor], saved: Any) -> None:
    for state, known in zip(kind.from_checkpoint(saved), own):  # noqa: B905 - of as many devices as there are on both sides
        if state.dtype != known.dtype or state.shape != known.shape:
            raise ValueError(
                f"a state of {tuple(state.shape)} {state.dtype}, expected {tuple(known.shape)} {known.dtype}"
            )


def _require_form(name: str, states: Mapping[str, Any], source: str, check: Callable[[Any], object]) -> None:
    if name not in states:
        return
    try:
        check(states[name])
    except Exception as error:
        raise CheckpointError(
            f"{source}: its {name!r} does not fit the generator here ({type(error).__name__}: {error}); was it saved "
            "with another version of the library? Nothing has been changed"
        ) from error


_WORDS = 624  # of the state of a Mersenne Twister


def _check_numpys(state: Any) -> None:
    kind = np.random.get_state(legacy=False)["bit_generator"]
    np.random.RandomState(getattr(np.random, kind)()).set_state(state)
    if kind != "MT19937":
        return
    position = state["state"]["pos"] if isinstance(state, Mapping) else state[2]
    if not 0 <= position <= _WORDS:  # NumPy would read there without a look
        raise ValueError(f"a position of {position} in {_WORDS} words")


# Generators that are not used.
_CHECKS: dict[str, Callable[[Any], object]] = {
    "random_state": lambda state: random.Random().setstate(state),
    "numpy_random_seed": _check_numpys,
    "torch_manual_seed": check_generator_state,
}
