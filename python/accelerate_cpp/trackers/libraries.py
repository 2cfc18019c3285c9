"""The Python packages of the built-in trackers: which there are, which are installed, and how they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

from accelerate_cpp.config.libraries import has_code
from accelerate_cpp.errors import MissingLibrary

MODULES: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "comet_ml": ("comet_ml",),
    "aim": ("aim",),
    "mlflow": ("mlflow",),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}
"""By name of the tracker, the modules of which one is needed, the preferred one first; they are called as on PyPI."""


def is_installed(name: str) -> bool:
    """Whether the built-in tracker ``name`` can be used here."""
    return any(map(has_code, MODULES[name]))


def how_to_install(name: str) -> str:
    """What is missing for the built-in tracker ``name``, and the command that installs it."""
    first = MODULES[name][0]
    return f"the Python package {first} is not installed; install it (pip install {first.replace('_', '-')})"


def load(name: str, submodule: str = "") -> ModuleType:
    """The module of the built-in tracker ``name``, or a ``submodule`` of it.

    Raises:
        MissingLibrary: it is not installed; the message says how to install it.
    """
    module = next(filter(has_code, MODULES[name]), None)
    if module is None:
        raise MissingLibrary(f"logging with {name}: {how_to_install(name)}, or remove {name} from log_with")
    return importlib.import_module(f"{module}.{submodule}" if submodule else module)
