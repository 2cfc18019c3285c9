"""send_to_device: devices, keys to skip, and the same object where nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_cpp.devices.transfer import send_to_device


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_may_be_a_name(device: Any) -> None:
    assert send_to_device(torch.ones(2), device).device == torch.device("meta")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        send_to_device(torch.ones(2), "nonsense")


@pytest.mark.parametrize("skip_keys", ["keep", ["keep"], ("keep", "other"), {"keep"}])
def test_skipped_keys_stay_at_every_depth(skip_keys: Any) -> None:
    tree = {"keep": torch.ones(1), "move": [{"keep": [torch.ones(2)], "move": torch.ones(3)}]}
    moved = send_to_device(tree, "meta", skip_keys=skip_keys)
    assert moved["keep"] is tree["keep"]
    assert moved["move"][0]["keep"] is tree["move"][0]["keep"]
    assert moved["move"][0]["move"].device.type == "meta"


def test_keys_to_skip_need_not_be_text() -> None:
    tree = {1: torch.ones(1), "1": torch.ones(1), (2, 3): torch.ones(1)}
    moved = send_to_device(tree, "meta", skip_keys=[1, (2, 3)])  # type: ignore[list-item]
    assert [value.device.type for value in moved.values()] == ["cpu", "meta", "cpu"]


def test_a_key_to_skip_is_a_whole_key() -> None:
    moved = send_to_device({"keeper": torch.ones(1), "k": torch.ones(1)}, "meta", skip_keys="keep")
    assert [value.device.type for value in moved.values()] == ["meta", "meta"]


def test_a_tensor_that_is_there_already_is_the_same_object() -> None:
    tensor, text = torch.ones(2), "text"
    assert send_to_device(tensor, "cpu") is tensor
    assert send_to_device(text, "meta") is text
