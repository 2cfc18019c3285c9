"""Training with Keras 3 on several processes, with any of its backends: TensorFlow, torch and JAX.

Start the program with ``accelerate-cpp launch --cpu``; alone, every function works on one process.
"""

from __future__ import annotations

from importlib.util import find_spec

from accelerate_cpp.errors import MissingLibrary

if find_spec("keras") is None:
    raise MissingLibrary("accelerate_cpp.keras needs Keras 3; install it, and a backend: pip install keras")

from accelerate_cpp.frameworks.processes import Processes, processes
from accelerate_cpp.keras.batches import data_loader
from accelerate_cpp.keras.callback import AccelerateCallback, average_metrics, broadcast_variables, main_process_only
from accelerate_cpp.keras.checkpoints import load_state, save_state
from accelerate_cpp.keras.optimizer import DistributedOptimizer

__all__ = [
    "AccelerateCallback",
    "DistributedOptimizer",
    "Processes",
    "average_metrics",
    "broadcast_variables",
    "data_loader",
    "load_state",
    "main_process_only",
    "processes",
    "save_state",
]
