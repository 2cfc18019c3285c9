"""Whether what lies between split layers computes with the part of each process alone: found out by a small input."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate_cpp.parallel.evaluating import evaluating

_log = logging.getLogger(__name__)


class _Reached(Exception):
    """The last layer has been reached."""


class Between:
    """What a module computes between layers that are split by their outputs and one that takes all of these.

    Args:
        parent: has them all; it is called with one tensor, of shape (1, 3, features).
        columns: layers that get the same input.
        rows: the layer that is split by its inputs.
    """

    def __init__(self, parent: nn.Module, columns: Sequence[nn.Linear], rows: nn.Linear) -> None:
        self._parent, self._columns, self._rows = parent, columns, rows
        self._changed: tuple[int, int] | None = None  # which part of how many

    def parameters(self, processes: int) -> list[nn.Parameter] | None:
        """The parameters that are used there, with each part of the features alone.

        Returns:
            ``None`` if a part depends on others, or if that cannot be found out: the module takes something else, or
            has no values.
        """
        if any(one.is_meta for one in (*self._parent.parameters(), *self._parent.buffers())):
            return None
        try:
            with self._watched():
                whole = self._reached(None)
                for part in {0, processes - 1}:
                    changed = self._reached((part, processes))
                    pairs = zip(_parts(whole, processes), _parts(changed, processes), strict=True)
                    same = [torch.equal(before, after) for before, after in pairs]
                    if any(is_same is (number == part) for number, is_same in enumerate(same)):
                        return None
                return self._used_for(whole)
        except Exception as error:  # it is not a module of this kind, and stays whole
            _log.debug("%s is not split: with one small tensor, %r was raised", type(self._parent).__name__, error)
            return None

    def _reached(self, changed: tuple[int, int] | None) -> torch.Tensor:
        """What the last layer gets."""
        self._changed = changed
        weight = self._columns[0].weight
        given = torch.randn(1, 3, self._columns[0].in_features, generator=torch.Generator().manual_seed(0))
        try:
            self._parent(given.to(weight.device, weight.dtype))
        except _Reached as found:
            reached: torch.Tensor = found.args[0]
            return reached
        raise RuntimeError("the last layer has not been reached")

    def _used_for(self, reached: torch.Tensor) -> list[nn.Parameter]:
        own = [one for one in self._parent.parameters() if one.is_floating_point()]
        frozen = [one for one in own if not one.requires_grad]
        for one in frozen:
            one.requires_grad_(True)
        try:
            again = self._reached(None) if frozen else reached
            if not again.requires_grad:
                return []
            gradients = torch.autograd.grad(again.float().sum(), own, allow_unused=True)
        finally:
            for one in frozen:
                one.requires_grad_(False)
        return [one for one, gradient in zip(own, gradients, strict=True) if gradient is not None]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Gradients end at the outputs of the first layers, which are changed in part; modules are in evaluation."""

        def begin(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
            parts = [part.clone() for part in _parts(output.detach(), self._changed[1] if self._changed else 1)]
            if self._changed is not None:
                parts[self._changed[0]] += 1.0
            return torch.cat(parts, -1)

        def end(_: nn.Module, args: tuple[Any, ...]) -> None:
            raise _Reached(args[0])

        handles: list[Any] = [layer.register_forward_hook(begin) for layer in self._columns]
        handles.append(self._rows.register_forward_pre_hook(end))
        try:
            with evaluating(self._parent), torch.enable_grad():
                yield
        finally:
            for handle in handles:
                handle.remove()


def _parts(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    return tensor.chunk(count, -1)
