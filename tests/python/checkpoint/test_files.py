"""Files with checksums, and what is said of damaged ones."""

from __future__ import annotations

import errno
import os
import pickle
import pickletools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.files import (
    ChecksummedFile,
    FileRecord,
    can_be_mapped,
    parse_size,
    read_pickle,
    record_of,
    replacing,
    write_bytes,
)
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure


def test_archives_of_torch_can_be_mapped_and_nothing_else(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "new")
    torch.save({}, tmp_path / "old", _use_new_zipfile_serialization=False)
    os.mkfifo(tmp_path / "pipe")
    assert [name for name in ("new", "old", "pipe", "missing") if can_be_mapped(tmp_path / name)] == ["new"]


def test_the_record_is_that_of_the_bytes_on_the_disk(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 * (1 << 20) + 5)
    with ChecksummedFile(tmp_path / "data") as file:
        file.write(data[:7])
        file.write(memoryview(data)[7:])
        record = file.finish()
    assert (tmp_path / "data").read_bytes() == data
    assert record == FileRecord(len(data), xxhash.xxh3_64_intdigest(data)) == record_of(tmp_path / "data")


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    record = write_pickle(tmp_path / "state.bin", {"a": torch.arange(1000.0), "b": [1, "x"]})
    loaded = torch.load(tmp_path / "state.bin", weights_only=True)
    assert torch.equal(loaded["a"], torch.arange(1000.0))
    assert loaded["b"] == [1, "x"]
    assert record == record_of(tmp_path / "state.bin")


def test_a_full_disk_is_an_error_with_the_path() -> None:
    with pytest.raises(SystemFailure, match="/dev/full") as raised:
        write_pickle(Path("/dev/full"), {"a": torch.zeros(1 << 20)})
    assert raised.value.errno == errno.ENOSPC


def test_a_missing_folder_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no/such"):
        write_bytes(tmp_path / "no" / "such", b"")


def test_random_states_of_numpy_are_safe_to_load(tmp_path: Path) -> None:
    write_pickle(tmp_path / "random.pkl", {"numpy": np.random.get_state()})
    before = set(torch.serialization.get_safe_globals())
    loaded = read_pickle(tmp_path / "random.pkl", "random states")["numpy"]
    assert np.array_equal(loaded[1], np.random.get_state()[1])
    assert set(torch.serialization.get_safe_globals()) == before


class Hostile:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> object:
        return Path.touch, (self.victim,)


class Calling:
    def __init__(self, function: Callable[..., object], argument: object) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> object:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"), [(os.system, r"posix\.system"), (eval, "eval"), (sys.exit, r"sys\.exit"), (len, "len")]
)
def test_what_a_pickle_would_have_called_is_named(tmp_path: Path, function: Callable[..., object], name: str) -> None:
    torch.save([Calling(function, "1")], tmp_path / "optimizer.bin")
    words = rf"optimizer\.bin: .* call functions that the file names: (\w+\.)?{name}\."
    with pytest.raises(CheckpointError, match=words) as refused:
        read_pickle(tmp_path / "optimizer.bin", "the state of optimizer 0")
    assert "damaged" not in str(refused.value)


def test_reduce_of_an_allowed_class_that_is_no_function_is_named(tmp_path: Path) -> None:
    # A pickle that calls what it has built itself: torch names the object.
    content = pickletools.optimize(b"\x80\x02ccollections\nOrderedDict\n)R)R.")
    (tmp_path / "optimizer.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin: ") as refused:
        read_pickle(tmp_path / "optimizer.bin", "the state of optimizer 0")
    assert "call functions" in str(refused.value)


def test_a_pickle_that_calls_functions_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    torch.save({"a": Hostile(tmp_path / "touched")}, tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin: expected the state .* call functions .*weights_only"):
        read_pickle(tmp_path / "optimizer.bin", "the state of optimizer 0")
    assert not (tmp_path / "touched").exists()
    read_pickle(tmp_path / "optimizer.bin", "the state of optimizer 0", weights_only=False)
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps({"a": 1})[:-3], "half"])
def test_a_damaged_pickle_is_named_with_what_was_expected(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "scheduler.bin"
    if content == "half":
        torch.save({"a": torch.zeros(10_000)}, path)
        content = path.read_bytes()[:20_000]
    assert isinstance(content, bytes)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"scheduler\.bin: expected the state of scheduler 0"):
        read_pickle(path, "the state of scheduler 0")


def test_what_was_asked_for_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pickle(tmp_path / "f", {"a": torch.zeros(1)})
    with pytest.raises(InvalidArgument, match="check map_location and load_kwargs"):
        read_pickle(tmp_path / "f", "a state", colour="red")

    def exhausted(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        read_pickle(tmp_path / "f", "a state")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scaler\.pt is missing; it should contain a scale"):
        read_pickle(tmp_path / "scaler.pt", "a scale")


def test_a_link_at_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "f").symlink_to(tmp_path / "victim")
    with pytest.raises(SystemFailure, match=r"writing .*f, after 0 bytes.*; remove the link, or choose another folder"):
        write_bytes(tmp_path / "f", b"new")
    with replacing(tmp_path / "f") as waiting:
        waiting.write_text("new")
    assert (tmp_path / "f").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(ValueError, match="halfway"), replacing(path) as waiting:
        waiting.write_text("ne")
        raise ValueError("halfway")
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    assert path.read_text() == "old"
    with replacing(path) as waiting:
        waiting.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(7, 7), (0, 0), ("20KB", 20_000), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("3tb", 3 * 10**12)],
)
def test_sizes_have_units(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


def test_a_small_b_is_bits_only_if_that_is_asked_for() -> None:
    assert parse_size("8Mb") == 8 * 10**6
    sizes = ["8Mb", "8MB", "8mb", "8Mib", "8MiB", 8]
    bits, whole, binary = 10**6, 8 * 10**6, 8 << 20
    assert [parse_size(size, small_b_is_bits=True) for size in sizes] == [bits, whole, bits, binary, binary, 8]


@pytest.mark.parametrize("text", ["", "ten", "GB", "5 parsecs", "5", "-1GB", "nanMB", "infKiB", -1])
def test_a_size_that_is_none_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"limit={text!r}: expected a number of bytes")):
        parse_size(text, argument="limit")
