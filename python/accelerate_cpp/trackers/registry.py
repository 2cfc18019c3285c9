"""Trackers by name: the built-in ones, those that scripts register, and which of them ``log_with`` asks for."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.aim import AimTracker
from accelerate_cpp.trackers.clearml import ClearMLTracker
from accelerate_cpp.trackers.comet import CometMLTracker
from accelerate_cpp.trackers.dvclive import DVCLiveTracker
from accelerate_cpp.trackers.general import GeneralTracker, require_attributes
from accelerate_cpp.trackers.main_process import is_main_process
from accelerate_cpp.trackers.mlflow import MLflowTracker
from accelerate_cpp.trackers.runs import SwanLabTracker, TrackioTracker, WandBTracker
from accelerate_cpp.trackers.tensorboard import TensorBoardTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}
"""The class of each tracker by its name; :func:`register_tracker_class` adds to it."""

_BUILT_IN: Mapping[str, type[GeneralTracker]] = dict(LOGGER_TYPE_TO_CLASS)
_ALL = "all"


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Makes ``log_with`` know the tracker ``tracker_class`` by its ``name``; call it before creating ``Accelerator``.

    ``init_trackers`` then creates it with the name of the project, with the folder for logs as the second argument if
    it requires one, and with the options that ``init_kwargs`` has for its name. A name that exists is given to the new
    class, with a warning.

    Raises:
        InvalidArgument: it is not a subclass of ``GeneralTracker``, or has no usable ``name`` or no
            ``requires_logging_directory`` of its class.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise InvalidArgument(f"register_tracker_class({tracker_class!r}): expected a subclass of GeneralTracker")
    name = inspect.getattr_static(tracker_class, "name", None)
    if not isinstance(name, str) or name in ("", _ALL):
        raise InvalidArgument(
            f"register_tracker_class({tracker_class.__qualname__}): its name is {name!r}; expected a class attribute "
            f"that is a text, and neither empty nor {_ALL!r}"
        )
    if not isinstance(inspect.getattr_static(tracker_class, "requires_logging_directory", None), bool):
        raise InvalidArgument(
            f"register_tracker_class({tracker_class.__qualname__}): expected a class attribute "
            "requires_logging_directory that is True (it takes a folder as its second argument) or False"
        )
    if LOGGER_TYPE_TO_CLASS.get(name, tracker_class) is not tracker_class:
        warnings.warn(
            f"register_tracker_class: the name {name!r} meant {LOGGER_TYPE_TO_CLASS[name].__qualname__}, and means "
            f"{tracker_class.__qualname__} from now on",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def installed() -> list[str]:
    """The names of the built-in trackers that can be used here."""
    return [name for name in libraries.MODULES if libraries.is_installed(name)]


def choose(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[str | GeneralTracker]:
    """The trackers that ``log_with`` asks for, each once, as names and objects.

    Args:
        log_with: ``None``, a name, a member of an enum whose value is a name, a tracker, or a list or tuple of these;
            ``"all"`` stands for all built-in trackers that are installed, before which trackers given as objects come.
        logging_dir: the folder for logs, if there is one.

    Returns:
        What can be used: built-in trackers whose library is not installed are left out, with a warning.

    Raises:
        InvalidArgument: a name is unknown, or needs ``logging_dir``, which is ``None``.
        NotImplementedError: a tracker lacks required attributes.
    """
    asked = list(log_with) if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    items = [_checked(item) for item in asked]
    if _ALL in [item for item in items if isinstance(item, str)]:
        objects = [item for item in items if isinstance(item, GeneralTracker)]
        names = [item for item in items if isinstance(item, str) and item != _ALL]
        items = [*objects, *installed(), *names]
    chosen: list[str | GeneralTracker] = []
    for item in items:
        if any(item is known or (isinstance(item, str) and item == known) for known in chosen):
            continue
        if isinstance(item, GeneralTracker) or _usable(item, logging_dir):
            chosen.append(item)
    return chosen


def create(
    name: str, project_name: str, logging_dir: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> GeneralTracker:
    """A new tracker of the class that ``name`` stands for, with ``options`` of its own."""
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    tracker: GeneralTracker = (
        kind(project_name, logging_dir, **options) if kind.requires_logging_directory else kind(project_name, **options)
    )
    return tracker


def _checked(item: Any) -> str | GeneralTracker:
    """A known name, or a complete tracker."""
    if isinstance(item, GeneralTracker):
        require_attributes(item)
        return item
    name = item.value if isinstance(item, Enum) else item
    if isinstance(name, str) and (name == _ALL or name in LOGGER_TYPE_TO_CLASS):
        return name
    is_class = isinstance(item, type) and issubclass(item, GeneralTracker)
    raise InvalidArgument(
        f"log_with: {item!r} is not a tracker; "
        + (
            "it is a class: pass an instance of it, or register it with register_tracker_class and pass its name"
            if is_class
            else f"expected one of {', '.join((_ALL, *LOGGER_TYPE_TO_CLASS))}, or an object of a subclass of "
            "GeneralTracker"
        )
    )


def _usable(name: str, logging_dir: str | os.PathLike[str] | None) -> bool:
    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind is _BUILT_IN.get(name) and not libraries.is_installed(name):
        if is_main_process():
            warnings.warn(
                f"log_with: nothing is logged with {name}, as {libraries.how_to_install(name)}, or take the name out",
                stacklevel=5,  # the script, through Accelerator
            )
        return False
    if kind.requires_logging_directory and logging_dir is None:
        raise InvalidArgument(
            f"log_with: Logging with `{name}` requires a `logging_dir`; pass project_dir to Accelerator, or "
            "project_config=ProjectConfiguration(logging_dir=...)"
        )
    return True
