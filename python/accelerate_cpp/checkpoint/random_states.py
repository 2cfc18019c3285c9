"""The states of random generators, under the names that the original gives them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accelerate_cpp.errors import CheckpointError

_DEVICE_TYPES = ("cuda", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron")


def _modules() -> dict[str, Any]:
    """The modules of the kinds of device that are here, by the names of their entries."""
    found = {name: getattr(torch, name, None) for name in _DEVICE_TYPES}
    return {
        f"torch_{name}_manual_seed": module
        for name, module in found.items()
        if module is not None and module.is_available()
    }


def random_states(step: int) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and ``step``, the micro-batches since a forced sync."""
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    return states | {name: module.get_rng_state_all() for name, module in _modules().items()}


def restore_random_states(states: Mapping[str, Any], source: str) -> None:
    """Continues from what :func:`random_states` returned; entries of devices that are not here are left out.

    Raises:
        CheckpointError: a state has another form than a generator takes; ``source`` says where it is from.
    """
    setters = {
        "random_state": random.setstate,
        "numpy_random_seed": np.random.set_state,
        "torch_manual_seed": torch.set_rng_state,
        **{name: module.set_rng_state_all for name, module in _modules().items()},
    }
    for name, restore in setters.items():
        if name in states:
            try:
                restore(states[name])
            except Exception as error:
                raise CheckpointError(
                    f"{source}: its {name!r} does not fit the generator here ({type(error).__name__}: {error}); was it "
                    "saved with another number of devices, or another version of the library?"
                ) from error
