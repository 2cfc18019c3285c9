"""Copies of states that are mapped from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint import memory
from accelerate_cpp.checkpoint.memory import off_the_file


def mapped(path: Path, content: Any) -> Any:
    torch.save(content, path)
    return torch.load(path, mmap=True)


def overwrite(path: Path) -> None:
    """With zeros, in place, which everything that is still mapped from it shows."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def test_what_was_mapped_is_copied_with_its_strides_and_what_it_shares(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    content = {"t": weight.t(), "row": weight[1], "sparse": torch.eye(2).to_sparse(), "step": 3, "empty": torch.ones(0)}
    state = mapped(tmp_path / "f", [content])
    (copied,) = off_the_file(state)
    overwrite(tmp_path / "f")
    assert state[0]["t"].tolist() == torch.zeros(3, 2).tolist()  # it is mapped
    assert (copied["t"].tolist(), copied["t"].stride()) == (weight.t().tolist(), weight.t().stride())
    assert copied["row"].tolist() == weight[1].tolist()
    assert copied["row"].untyped_storage().data_ptr() == copied["t"].untyped_storage().data_ptr()
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(2))
    assert (copied["step"], copied["empty"].shape) == (3, (0,))


def test_tensors_are_copied_by_all_threads_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[int] = []
    copy_tensors = memory.copy_tensors

    def noted(rooms: list[torch.Tensor], sources: list[torch.Tensor], num_threads: int) -> None:
        targets.extend(room.data_ptr() for room in rooms)
        assert num_threads == torch.get_num_threads()
        copy_tensors(rooms, sources, num_threads)

    monkeypatch.setattr(memory, "copy_tensors", noted)
    copied = off_the_file(mapped(tmp_path / "f", [torch.ones(3), torch.ones(4)]))
    assert [tensor.data_ptr() for tensor in copied] == targets
