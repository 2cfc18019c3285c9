"""Training with TensorFlow on several processes: collectives, averaged gradients, batches of a rank, checkpoints.

Start the program with ``accelerate-cpp launch --cpu`` or :func:`accelerate_cpp.notebook_launcher`; alone, every
function works on one process. TensorFlow computes on CPUs here. For Keras, see :mod:`accelerate_cpp.keras`.
"""

from __future__ import annotations

from importlib.util import find_spec

from accelerate_cpp.errors import MissingLibrary

if find_spec("tensorflow") is None:
    raise MissingLibrary("accelerate_cpp.tensorflow needs TensorFlow; install it: pip install tensorflow-cpu")

from accelerate_cpp.frameworks.processes import Processes, processes
from accelerate_cpp.tensorflow.batches import data_loader, shard_dataset
from accelerate_cpp.tensorflow.checkpoints import load_state, save_state
from accelerate_cpp.tensorflow.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    broadcast_variables,
    gather_for_metrics,
    reduce_scatter,
)
from accelerate_cpp.tensorflow.gradients import DistributedGradientTape, average_gradients

__all__ = [
    "DistributedGradientTape",
    "Processes",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "data_loader",
    "gather_for_metrics",
    "is_main_process",
    "load_state",
    "processes",
    "rank",
    "reduce_scatter",
    "save_state",
    "shard_dataset",
    "world_size",
]


def rank() -> int:
    """The number of this process among all of the run, from 0.

    Example:
        >>> from accelerate_cpp.tensorflow import rank
        >>> rank()
        0
    """
    return processes().rank


def world_size() -> int:
    """The number of processes of the run.

    Example:
        >>> from accelerate_cpp.tensorflow import world_size
        >>> world_size()
        1
    """
    return processes().world_size


def is_main_process() -> bool:
    """Whether this is rank 0.

    Example:
        >>> from accelerate_cpp.tensorflow import is_main_process
        >>> is_main_process()
        True
    """
    return processes().is_main_process
