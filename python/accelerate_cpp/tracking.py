"""Experiment trackers: the trackers for ``Accelerator(log_with=...)``, and the base class for custom trackers.

A custom tracker is a subclass of :class:`GeneralTracker` with a ``name``, ``requires_logging_directory`` and
``tracker``; pass an instance of it in ``log_with``, or its name after :func:`register_tracker_class`. Methods decorated
with :func:`on_main_process` only run on the main process. ``Accelerator`` itself calls trackers only there, unless
their ``main_process_only`` is ``False``.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.plugins.enums import LoggerType
from accelerate_cpp.trackers.aim import AimTracker
from accelerate_cpp.trackers.clearml import ClearMLTracker
from accelerate_cpp.trackers.comet import CometMLTracker
from accelerate_cpp.trackers.dvclive import DVCLiveTracker
from accelerate_cpp.trackers.general import GeneralTracker
from accelerate_cpp.trackers.main_process import on_main_process
from accelerate_cpp.trackers.mlflow import MLflowTracker
from accelerate_cpp.trackers.registry import LOGGER_TYPE_TO_CLASS, choose, installed, register_tracker_class
from accelerate_cpp.trackers.runs import SwanLabTracker, TrackioTracker, WandBTracker
from accelerate_cpp.trackers.tensorboard import TensorBoardTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

__getattr__ = lending("tracking")


def get_available_trackers() -> list[LoggerType]:
    """The built-in trackers whose libraries are installed."""
    return [LoggerType(name) for name in installed()]


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """The trackers in ``log_with`` that can be used here, each once.

    Args:
        log_with: names, members of ``LoggerType``, and objects of custom trackers, one or a list; ``"all"`` means
            :func:`get_available_trackers`.
        logging_dir: the folder for logs; TensorBoard, Aim and some custom trackers need one.

    Returns:
        Members of ``LoggerType``, the names of registered trackers, and objects. A built-in tracker whose library is
        not installed is skipped with a warning.

    Raises:
        InvalidArgument: a name is unknown, or needs ``logging_dir``, which is ``None``.
        NotImplementedError: a custom tracker lacks required attributes.
    """
    chosen = choose(log_with, logging_dir)
    return [LoggerType(item) if isinstance(item, str) and item in LoggerType else item for item in chosen]
