"""Moving nested batches to a device."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_cpp._native import move_tree


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
    return move_tree(tree, torch.device(device), non_blocking, keys)
