"""Files that ``torch.load`` reads, against those that ``torch.save`` writes."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint.archive import write_archive, write_pickle
from accelerate_cpp.checkpoint.files import ChecksummedFile, record_of

_LARGE = (4 << 30) + 1  # bytes
_IDENTIFIER = "archive/.data/serialization_id"


def states() -> dict[str, Any]:
    weight = torch.arange(1 << 19, dtype=torch.float32).reshape(512, 1024)
    return {
        "weight": weight,
        "transposed": weight.t(),
        "slice": weight[3:5, ::2],
        "small": torch.arange(5, dtype=torch.int8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "ünï": [1, "x", {"lr": 1e-3}, None],
    }


def by_torch(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def places(path: Path) -> list[tuple[str, int, int]]:
    return [(one.filename, one.header_offset, one.file_size) for one in zipfile.ZipFile(path).infolist()]


def test_all_but_the_identifier_of_the_file_is_what_torch_writes(tmp_path: Path) -> None:
    content = states()
    expected = by_torch(content)
    assert write_pickle(tmp_path / "ours", content) == record_of(tmp_path / "ours")
    found = (tmp_path / "ours").read_bytes()
    (tmp_path / "theirs").write_bytes(expected)
    assert places(tmp_path / "ours") == places(tmp_path / "theirs")
    # The identifier itself, and its checksum behind it and in the directory.
    identifiers = [zipfile.ZipFile(tmp_path / name).read(_IDENTIFIER) for name in ("ours", "theirs")]
    checksums = [zipfile.ZipFile(tmp_path / name).getinfo(_IDENTIFIER).CRC for name in ("ours", "theirs")]
    for own, torchs in (identifiers, [checksum.to_bytes(4, "little") for checksum in checksums]):
        assert found.count(own) == expected.count(torchs) > 0
        found = found.replace(own, torchs)
    assert found == expected


def test_other_programs_find_the_archive_sound(tmp_path: Path) -> None:
    write_pickle(tmp_path / "ours", states())
    assert zipfile.ZipFile(tmp_path / "ours").testzip() is None


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_loads_what_was_written(tmp_path: Path, mapped: bool) -> None:
    content = states()
    write_pickle(tmp_path / "ours", content)
    loaded = torch.load(tmp_path / "ours", mmap=mapped)
    assert loaded.keys() == content.keys()
    assert loaded.pop("ünï") == content.pop("ünï")
    for name, tensor in content.items():
        assert torch.equal(loaded[name].to_dense(), tensor.to_dense()), name
    assert loaded["transposed"].data_ptr() == loaded["weight"].data_ptr()


def test_archives_can_follow_each_other_in_a_file(tmp_path: Path) -> None:
    first, second = torch.arange(100.0), torch.arange(7)
    with ChecksummedFile(tmp_path / "f") as file:
        write_archive(file, first)
        end = file.num_bytes
        write_archive(file, second)
        file.finish()
    data = (tmp_path / "f").read_bytes()
    assert len(data[:end]) == len(by_torch(first))
    assert torch.equal(torch.load(io.BytesIO(data[:end])), first)
    assert torch.equal(torch.load(io.BytesIO(data[end:])), second)


class _Sink:
    """Counts what would be in a file, and keeps all of it but what is long."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.kept: dict[int, bytes] = {}

    def write(self, data: Any, _observe: Callable[[memoryview], object] | None = None) -> int:
        size = len(memoryview(data).cast("B"))
        if size < 1 << 20:
            self.kept[self.num_bytes] = bytes(data)
        self.num_bytes += size
        return size

    def read(self, place: int, size: int) -> bytes:
        begin = max(begin for begin in self.kept if begin <= place)
        text = b"".join(self.kept[key] for key in sorted(self.kept) if key >= begin)
        return text[place - begin : place - begin + size]


class _Sparse(io.RawIOBase):
    """A sink as a file for the library of zip archives, which only looks at the directory."""

    def __init__(self, sink: _Sink) -> None:
        self._sink, self._place = sink, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._sink.num_bytes)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        data = self._sink.read(self._place, self._sink.num_bytes - self._place if size < 0 else size)
        self._place += len(data)
        return data


def test_sizes_and_places_beyond_32_bits_are_in_the_directory() -> None:
    large = torch.empty(_LARGE, dtype=torch.uint8)  # never touched, so it takes no memory
    sink = _Sink()
    write_archive(sink, [large, torch.ones(3), torch.ones(4)])  # type: ignore[arg-type]
    entries = {one.filename: one for one in zipfile.ZipFile(_Sparse(sink)).infolist()}  # type: ignore[arg-type]
    assert entries["archive/data/0"].file_size == _LARGE
    for name in ("archive/data/1", "archive/data/2"):
        place = entries[name].header_offset
        assert place > _LARGE
        assert sink.read(place, 4) == b"PK\3\4"
        lengths = sink.read(place + 26, 4)
        data = place + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        assert data % 64 == 0
        assert sink.read(data, 4) == torch.ones(1).numpy().tobytes()


@pytest.mark.long
def test_a_file_of_more_than_four_gigabytes_is_what_torch_writes(tmp_path: Path) -> None:
    content = [torch.zeros(_LARGE, dtype=torch.uint8), torch.ones(3), torch.ones(4)]
    write_pickle(tmp_path / "ours", content)
    with (tmp_path / "theirs").open("wb") as file:
        torch.save(content, file)
    assert places(tmp_path / "ours") == places(tmp_path / "theirs")
    loaded = torch.load(tmp_path / "ours", mmap=True)
    assert (loaded[0].shape, loaded[2].tolist()) == (content[0].shape, [1, 1, 1, 1])
