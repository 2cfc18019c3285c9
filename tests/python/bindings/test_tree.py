"""move_tree as Python sees it."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp._native import move_tree

META = torch.device("meta")


def test_it_takes_the_device_whether_to_block_and_the_keys_to_skip() -> None:
    tree = {"a": torch.ones(2), "b": [torch.ones(2)]}
    moved = move_tree(tree=tree, device=META, non_blocking=True, skip_keys=("b",))
    assert moved["a"].device == META
    assert moved["b"] is tree["b"]


def test_a_device_must_be_one() -> None:
    with pytest.raises(TypeError, match="device"):
        move_tree([], "meta", False, ())  # type: ignore[arg-type]
