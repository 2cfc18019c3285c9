"""A double of torch_xla for tests where it cannot be imported: its devices are the CPU, its processes those of a launch
by RANK and WORLD_SIZE, and every call is written down.

``treat_cpu_as_xla`` lets this package take the CPU for a device of torch_xla.
"""

from __future__ import annotations

import torch

__version__ = "2.9.0"

calls: list[str] = []
"""The calls of this process, in order, each with what matters of its arguments."""


def device() -> torch.device:
    return torch.device("cpu")


def sync(wait: bool = False) -> None:
    calls.append("sync")


class _XLAC:
    """The functions of torch_xla's C++ module that are asked."""

    @staticmethod
    def _xla_runtime_is_initialized() -> bool:
        return True


def treat_cpu_as_xla() -> None:
    from dataclasses import replace

    from accelerate_cpp.devices import table

    row = next(row for row in table._ROWS if row.type == "xla")
    table._CPU = replace(row, type="cpu")  # type: ignore[assignment]
