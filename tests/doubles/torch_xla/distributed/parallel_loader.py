"""Loaders that read one batch after the other; the real ones have threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch_xla


class ParallelLoader:
    def __init__(self, cpu_loader: Iterable[Any], devices: list[Any], **options: Any) -> None:
        torch_xla.calls.append(f"ParallelLoader {sorted(name for name, value in options.items() if value is not None)}")
        self._batches = cpu_loader

    def per_device_loader(self, device: Any) -> Iterator[Any]:
        for batch in self._batches:
            torch_xla.calls.append("next")
            yield batch

    def close(self) -> None:
        torch_xla.calls.append("close")


class MpDeviceLoader:
    """Only its name is used, by programs that ask for the kind of a loader."""
