"""Copies that training does not change."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from accelerate_cpp.checkpoint.snapshot import SnapshotMemory
from accelerate_cpp.checkpoint.snapshot import snapshot as snapshot_in


def snapshot(state: Any) -> Any:
    return snapshot_in(state, SnapshotMemory())


def test_a_snapshot_is_equal_and_does_not_follow() -> None:
    state: dict[str, Any] = {
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "state": {0: {"step": torch.tensor(3.0), "m": torch.arange(6.0).reshape(2, 3).t()}},
        "half": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)),
    }
    copied = snapshot(state)
    state["groups"][0]["lr"] = 0.2
    state["state"][0]["m"].fill_(9)
    state["half"][0].fill_(9)
    assert copied["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert torch.equal(copied["state"][0]["m"], torch.arange(6.0).reshape(2, 3).t())
    assert copied["half"][0].tolist() == [1, 1, 1]
    assert copied["half"][1].shape == (0,)


def test_the_order_and_the_kind_of_containers_are_kept() -> None:
    model = torch.nn.BatchNorm1d(2)
    copied = snapshot(model.state_dict())
    assert type(copied) is OrderedDict
    assert list(copied) == list(model.state_dict())
    assert copied._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_tensors_that_shared_memory_share_it_in_the_copy() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    copied = snapshot([{"a": weight, "b": weight.detach(), "c": torch.ones(4)}])[0]
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != copied["c"].data_ptr()
    assert copied["a"].data_ptr() != weight.data_ptr()


def test_sparse_tensors_and_other_values_are_copied_as_well() -> None:
    values = [1]
    copied = snapshot({"sparse": torch.eye(2).to_sparse(), "values": values})
    values.append(2)
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(2))
    assert copied["values"] == [1]


def test_the_next_snapshot_takes_the_same_memory_if_it_is_large_enough() -> None:
    memory = SnapshotMemory()
    place = snapshot_in([torch.ones(100)], memory)[0].data_ptr()
    second = snapshot_in([torch.zeros(50)], memory)[0]
    assert (second.data_ptr(), second.tolist()) == (place, [0.0] * 50)
    assert snapshot_in([torch.full((1000,), 2.0)], memory)[0].tolist() == [2.0] * 1000
    memory.release()
    assert snapshot_in([torch.empty(0)], memory)[0].shape == (0,)
