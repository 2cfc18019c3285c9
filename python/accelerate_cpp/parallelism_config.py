"""How many processes each kind of parallelism has, under the original's name of the module."""

from __future__ import annotations

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

__all__ = ["ParallelismConfig"]

__getattr__ = lending("parallelism_config")
