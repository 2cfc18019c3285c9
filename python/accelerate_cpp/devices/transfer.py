"""Moving nested batches to a device: at once, or on a stream of their own beside the batch before."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from accelerate_cpp._native import move_tree
from accelerate_cpp.devices.tree import honor_type, leaves_of, rebuild_mapping


def send_to_device(
    tree: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | tuple[str, ...] | None = None,
) -> Any:
    """A tree of the same types in which every tensor is on ``device``.

    Lists, tuples, named tuples, mappings and dataclasses are walked; objects with a ``.to`` method move themselves;
    anything else is kept. Tensors that are on the device already are not copied.

    Args:
        tree: a tensor or a nested container of tensors, of any shapes and dtypes.
        device: the target.
        non_blocking: whether copies from pinned memory may overlap with computation.
        skip_keys: entries of mappings that stay where they are.
    """
    keys = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if torch.compiler.is_compiling():
        return _moved_while_compiling(tree, torch.device(device), non_blocking, keys)
    return move_tree(tree, torch.device(device), non_blocking, keys)


def _moved_while_compiling(tree: Any, device: torch.device, non_blocking: bool, skip_keys: Collection[Any]) -> Any:
    """What ``move_tree`` does (csrc/torch_bridge/tree.h), in Python: ``torch.compile`` cannot look into C++."""

    def move(node: Any) -> Any:
        if isinstance(node, torch.Tensor) or (hasattr(node, "to") and not isinstance(node, type)):
            return node.to(device, non_blocking=True) if non_blocking else node.to(device)
        if isinstance(node, (tuple, list)):
            return honor_type(node, [move(child) for child in node])
        if isinstance(node, Mapping):
            entries = {key: child if key in skip_keys else move(child) for key, child in node.items()}
            return rebuild_mapping(node, entries)
        if is_dataclass(node) and not isinstance(node, type):
            moved = copy.copy(node)
            for field in fields(node):
                if hasattr(node, field.name):
                    object.__setattr__(moved, field.name, move(getattr(node, field.name)))
            return moved
        return node

    return move(tree)


@dataclass(frozen=True)
class Copying:
    """A batch on its way: where it arrives, and what says when."""

    batch: Any
    arrived: Any


class CopyStream:
    """A CUDA stream of its own for the copies of one pass over a loader.

    Args:
        device: the GPU.
        cuda: ``torch.cuda``.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def begin(self, batch: Any) -> Copying:
        """Starts to copy ``batch``, whose tensors should be pinned: copies of others make the host wait."""
        with self._cuda.stream(self._stream):
            moved = send_to_device(batch, self._device, non_blocking=True)
            return Copying(moved, self._stream.record_event())

    def end(self, copying: Copying) -> Any:
        """The batch. What is computed from now on waits for the copy, the host does not."""
        current = self._cuda.current_stream(self._device)
        current.wait_event(copying.arrived)
        for leaf in leaves_of(copying.batch):
            if isinstance(leaf, torch.Tensor):
                # Its memory belongs to the stream of copies, which must not reuse it while it is computed with.
                leaf.record_stream(current)
        return copying.batch
