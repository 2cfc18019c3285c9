"""A drop-in for Hugging Face Accelerate with a C++ core. Each name is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF: dict[str, str] = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "utils.dataclasses",
    "DDPCommunicationHookType": "utils.dataclasses",
    "DataLoaderConfiguration": "utils.dataclasses",
    "DistributedDataParallelKwargs": "utils.dataclasses",
    "DistributedType": "utils.dataclasses",
    "GradScalerKwargs": "utils.dataclasses",
    "InitProcessGroupKwargs": "utils.dataclasses",
    "PartialState": "state",
    "ProfileKwargs": "utils.dataclasses",
    "debug_launcher": "launchers",
    "notebook_launcher": "launchers",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "utils",
}
_SUBMODULES = frozenset(
    {
        "accelerator",
        "commands",
        "data_loader",
        "errors",
        "launchers",
        "logging",
        "optimizer",
        "scheduler",
        "state",
        "utils",
    }
)

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
