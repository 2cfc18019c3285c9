"""Files in the safetensors format: what can be written, and what is said of damaged ones."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor

from accelerate_cpp.checkpoint.files import record_of
from accelerate_cpp.checkpoint.safetensors_file import (
    check_safetensors,
    open_safetensors,
    place_of,
    read_safetensors,
    without_duplicates,
    write_safetensors,
)
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure

DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 uint16 uint32 uint64 float8_e4m3fn "
    "float8_e5m2"
)
TENSORS = {
    **{name: torch.arange(6, dtype=torch.float32).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES.split()},
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "ünï": torch.ones(1),
}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert (
            tensor.contiguous().flatten().view(torch.uint8).equal(second[name].contiguous().flatten().view(torch.uint8))
        )


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    record = write_safetensors(tmp_path / "f.safetensors", TENSORS)
    same(load_file(tmp_path / "f.safetensors"), TENSORS)
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert record == record_of(tmp_path / "f.safetensors")


def test_the_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {name: TENSORS[name].contiguous() for name in ("float64", "float32", "empty", "scalar", "int8", "ünï")}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_is_conjugated_or_negated_only_when_it_is_read_is_written_as_it_is_read(tmp_path: Path) -> None:
    lazy = torch.tensor([1 + 2j]).conj()
    write_safetensors(tmp_path / "f", {"conjugated": lazy, "negated": lazy.imag})
    read = read_safetensors(tmp_path / "f")
    assert (read["conjugated"].tolist(), read["negated"].tolist()) == ([1 - 2j], [-2.0])


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no elements of four bits")
def test_two_elements_in_a_byte_are_two_in_the_format(tmp_path: Path) -> None:
    pairs = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    write_safetensors(tmp_path / "f", {"a": pairs})
    read = read_safetensors(tmp_path / "f")["a"]
    assert (read.dtype, read.view(torch.uint8).tolist()) == (pairs.dtype, [[0, 1, 2], [3, 4, 5]])


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "f.safetensors", metadata={"format": "pt"})
    check_safetensors(tmp_path / "f.safetensors")
    same(read_safetensors(tmp_path / "f.safetensors"), TENSORS)


def test_tensors_are_read_one_by_one_from_an_open_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f.safetensors", {"a": torch.zeros(4), "b": torch.ones(2)})
    file = open_safetensors(tmp_path / "f.safetensors")
    assert (file.get_slice("b").get_shape(), file.get_tensor("b").tolist()) == ([2], [1, 1])


def test_no_tensors_make_a_file_too(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f.safetensors", {})
    assert read_safetensors(tmp_path / "f.safetensors") == {} == load_file(tmp_path / "f.safetensors")


def test_changing_what_was_read_does_not_change_the_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f.safetensors", {"a": torch.zeros(4)})
    read_safetensors(tmp_path / "f.safetensors")["a"].fill_(1)
    assert torch.equal(read_safetensors(tmp_path / "f.safetensors")["a"], torch.zeros(4))


def raw(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def row(dtype: str = "F32", shape: Any = (2,), begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (1 << 60).to_bytes(8, "little") + b"{}",
        raw(b"{nonsense", b""),
        raw([1], b""),
        raw({"a": 5}, b""),
        raw(row("F33"), bytes(8)),
        raw(row(shape=(-2,)), bytes(8)),
        raw(row(shape=(3,)), bytes(8)),
        raw(row(begin=4, end=12), bytes(12)),
        raw(row(), bytes(7)),
        raw(row(), bytes(9)),
        raw({"a": row()["a"], "b": row()["a"]}, bytes(8)),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for read in (read_safetensors, check_safetensors, open_safetensors):
        with pytest.raises(CheckpointError, match=r"(?s)model\.safetensors: expected .*, found .*load another"):
            read(path)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(raw(json.dumps(row()).encode() + b" " * (len(json.dumps(row())) % 2 + 1), bytes(8)))
    assert torch.equal(read_safetensors(tmp_path / "f")["a"], torch.zeros(2))


@pytest.mark.parametrize("value", ["text", torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)])
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"'extra' is a .*safe_serialization=False"):
        write_safetensors(tmp_path / "f", {"extra": value})
    assert not (tmp_path / "f").exists()


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="meta device"):
        write_safetensors(tmp_path / "f", {"a": torch.empty(2, device="meta")})


def test_tensors_that_overlap_are_all_written(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensors = {"first": whole[:4], "last": whole[2:], "whole": whole, "transposed": whole.view(2, 3).t()}
    write_safetensors(tmp_path / "f", tensors)
    same(read_safetensors(tmp_path / "f"), tensors)


def test_what_the_system_refuses_is_an_error_with_the_path(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SystemFailure, match=r"too large while writing .*model\.safetensors") as raised:
            write_safetensors(tmp_path / "model.safetensors", {"a": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG


def test_whoever_may_read_other_files_may_read_these(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_safetensors(tmp_path / "f", {"a": torch.zeros(1)})
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_missing_folder_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure, match="no/such") as raised:
        write_safetensors(tmp_path / "no" / "such", {"a": torch.zeros(1)})
    assert raised.value.errno == errno.ENOENT


def test_a_file_is_kept_when_the_format_cannot_hold_what_should_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_safetensors(path, {"a": torch.ones(2)})
    with pytest.raises(InvalidArgument):
        write_safetensors(path, {"a": torch.ones(2, dtype=torch.complex128)})
    assert read_safetensors(path)["a"].tolist() == [1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_tensors_made_of_several_are_told_apart_and_not_written(tmp_path: Path) -> None:
    pairs = {name: TwoTensor(torch.ones(2), torch.ones(2)) for name in ("a", "b")}
    assert list(without_duplicates(pairs)) == ["a", "b"]
    with pytest.raises(InvalidArgument, match="'a' is a TwoTensor"):
        write_safetensors(tmp_path / "f", pairs)


def test_tied_weights_are_kept_once_and_slices_of_one_tensor_all() -> None:
    whole = torch.arange(4.0)
    tensors = {"a": whole, "b": whole.detach(), "first": whole[:2], "second": whole[2:], "e": torch.empty(0)}
    tensors["f"] = torch.empty(0)
    assert list(without_duplicates(tensors)) == ["a", "first", "second", "e", "f"]
    assert place_of(whole) != place_of(whole.view(2, 2))
