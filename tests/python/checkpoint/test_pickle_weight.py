"""Pickles of a few bytes take little time and memory, and sound ones of any size and kind are read as before."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from accelerate_cpp.checkpoint.files import read_pickle
from accelerate_cpp.checkpoint.pickle_weight import check_index, check_saved, check_saved_file
from accelerate_cpp.errors import CheckpointError

# 2 ** 26 values, which any machine can make in a second or two; 2 ** 50 take as few bytes.
DOUBLINGS = range(1, 27)
NUMBER = b"J\0\0\x10\0"  # 1 << 20


def word(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def call(name: str, arguments: bytes) -> bytes:
    """The opcodes for ``name(*arguments)``."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n(".encode() + arguments + b"tR"


def tuples() -> bytes:
    """Tuples of two references to the one before; the last is number 26."""
    return b"K\0\x85q\0" + b"".join(b"h%ch%c\x86q%c" % (one - 1, one - 1, one) for one in DOUBLINGS)


def lists() -> bytes:
    return b"]K\0aq\0" + b"".join(b"](h%ch%ceq%c" % (one - 1, one - 1, one) for one in DOUBLINGS)


def lists_from_above() -> bytes:
    """The same, where each list is empty when it is referred to, and filled later."""
    made = b"".join(b"]q%c" % one for one in DOUBLINGS)
    filled = b"".join(b"h%c(h%ch%ce" % (one, one + 1, one + 1) for one in DOUBLINGS[:-1])
    return b"(" + made + filled + b"t"


# Of four elements; what it is called is tried by nothing that refuses it.
STORAGE = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word("0") + word("cpu") + b"K\4tQ"


def tensor_of(shape: bytes, strides: bytes) -> bytes:
    hooks = b"ccollections\nOrderedDict\n)R"
    return call("torch._utils._rebuild_tensor_v2", STORAGE + b"K\0" + shape + strides + b"\x89" + hooks)


def tensor(size: bytes, stride: bytes) -> bytes:
    return tensor_of(b"(" + size + b"t", b"(" + stride + b"t")


def written_out(made: bytes) -> bytes:
    arguments = made + b"ctorch\nfloat64\n" + word("cpu") + b"\x89"
    return call("torch._utils._rebuild_device_tensor_from_cpu_tensor", arguments)


def number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def pairs_that_hash_alike(count: int) -> list[tuple[int, int]]:
    """Python mixes each element of a tuple into a number of 64 bits, in a way that can be turned around."""
    first, second, start, bits = 11400714785074694791, 14029467366897019727, 2870177450012600261, 1 << 64
    found: list[tuple[int, int]] = []
    one = 1
    while len(found) < count:
        one += 1
        mixed = (start + one * second) % bits
        mixed = (mixed << 31 | mixed >> 33) % bits * first % bits
        other = (12345 - mixed) * pow(second, -1, bits) % bits
        other -= bits * (other >= bits // 2)
        if abs(other) < (1 << 61) - 1:
            found.append((one, other))
    assert len({hash(pair) for pair in found}) == 1
    return found


ALIKE = pairs_that_hash_alike(6000)
EXPANDED = tensor(NUMBER, b"K\0")
BY_TYPE = "torch._tensor._rebuild_from_type_v2"
TENSOR = b"ctorch\nTensor\n"

HOSTILE = {
    "tuples-as-a-key": b"(" + tuples() + b"}h\x1aK\1st",
    "lists": b"(" + lists() + b"t",
    "lists-from-above": lists_from_above(),
    "many-keys": b"]("
    + b"K\0\x85q\0"
    + b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 21))
    + b"}h\x14K\1s" * 20
    + b"e",
    "left-over": b"K\1K\2",
    "a-list-in-itself": b"]q\0h\0a",
    "deep": b"}K\0" + b"\x85" * 1000 + b"K\1s",
    "bytearray": call("builtins.bytearray", NUMBER),
    "bytearray-of-python-2": call("__builtin__.bytearray", NUMBER),
    "new-bytearray": b"cbuiltins\nbytearray\n" + NUMBER + b"\x85\x81",
    "copies": b"]("
    + word("x" * 1_000_000)
    + b"q\0"
    + b"".join(call("_codecs.encode", b"h\0" + word("latin1")) for _ in range(50))
    + b"e",
    "slow-codec": call("_codecs.encode", word("x") + word("punycode")),
    "array": call(
        f"{np.core.multiarray.__name__ if not hasattr(np, '_core') else 'numpy._core.multiarray'}._reconstruct",
        b"cnumpy\nndarray\n" + NUMBER + b"\x85" + word("b"),
    ),
    "new-array": b"cnumpy\nndarray\n" + NUMBER + b"\x85\x85\x81",
    "objects": call("numpy.dtype", word("O8") + b"\x89\x88"),
    "tensor": call("torch.FloatTensor", NUMBER),
    "bytearray-of-a-type": call(BY_TYPE, b"cbuiltins\nbytearray\n" + TENSOR + NUMBER + b"\x85}"),
    "tensor-of-a-type": call(BY_TYPE, b"ctorch\nFloatTensor\n" + TENSOR + NUMBER + b"\x85}"),
    "state-of-an-enum": call(
        BY_TYPE,
        b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n" * 2 + b"K\2\x85}" + word("_value_") + b"K\x63s",
    ),
    "set-of-a-tensor": call("builtins.set", EXPANDED),
    "counter-of-a-tensor": call("collections.Counter", tensor(b"K\4", b"K\1")),
    "shape-of-a-tensor": call("torch.Size", EXPANDED),
    "call-with-a-tensor": call(BY_TYPE, b"cbuiltins\nset\n" + TENSOR + EXPANDED + b"}"),
    "written-out": written_out(EXPANDED),
    "written-out-of-a-parameter": written_out(
        call("torch._utils._rebuild_parameter", EXPANDED + b"\x89ccollections\nOrderedDict\n)R")
    ),
    "written-out-of-a-list": written_out(tensor_of(b"](" + NUMBER + b"e", b"](K\0e")),
    "written-out-of-a-size": written_out(tensor_of(b"ctorch\nSize\n" + NUMBER + b"\x85\x85R", b"K\0\x85")),
    "written-out-of-another-size": written_out(
        tensor(b"K\1", b"K\1") + b"(" + tensor(b"K\1", b"K\1") + b"K\0" + NUMBER + b"\x85K\0\x85tb"
    ),
    "written-out-of-an-empty-tensor": written_out(
        call("torch.FloatTensor", b"") + b"(" + STORAGE + b"K\0" + NUMBER + b"\x85K\0\x85tb"
    ),
    "written-out-of-a-storage-of-another-size": b"("
    + tensor(b"K\4", b"K\1")
    + tensor(NUMBER, b"K\1").replace(b"K\4tQ", NUMBER + b"tQ")
    + b"t",
    "written-out-of-another-storage": written_out(
        tensor(NUMBER, b"K\0").replace(STORAGE, call("torch.storage.TypedStorage", b"") + b"}b")
    ),
    "a-method-of-a-counter": call("collections.Counter", b"") + b"}" + word("get") + b"cbuiltins\ncomplex\nsb",
    "a-method-of-a-tensor": call(
        BY_TYPE,
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + TENSOR
        + b"("
        + STORAGE
        + b"K\0K\4\x85K\1\x85\x89ccollections\nOrderedDict\n)Rt}"
        + word("numel")
        + b"cbuiltins\nbytearray\ns",
    ),
    "arrays-of-nothing": call("numpy.dtype", word("S0") + b"\x89\x88"),
    "pairs-of-a-tensor": call("collections.OrderedDict", b"](" + EXPANDED + b"e"),
    "size-of-a-list": call("torch.Size", b"](K\1K\2e"),
    "counter-of-python-2": call("UserDict.Counter", tensor(b"K\4", b"K\1")),
    "dtype-with-fields": call("numpy.dtype", word("u4") + b"\x89\x88")
    + b"(K\3"
    + word("<")
    + b"N"
    + word("f")
    + b"\x85}"
    + word("f")
    + call("numpy.dtype", word("u4") + b"\x89\x88")
    + b"J\0\xca\x9a;\x86sJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb",
    "a-method-of-a-dict": b"ccollections\nOrderedDict\n)R}" + word("values") + b"ccollections\nOrderedDict\nsb",
    "another-beside-metadata": b"ccollections\nOrderedDict\n)R}("
    + word("_metadata")
    + b"N"
    + word("items")
    + b"ccollections\nOrderedDict\nub",
    "a-mesh": call("torch.distributed.device_mesh.DeviceMesh", word("cpu") + b"](K\0K\1e"),
    "tuples-that-hash-alike": b"}(" + b"".join(number(a) + number(b) + b"\x86N" for a, b in ALIKE) + b"u",
    "inner-tuples-that-hash-alike": b"}(" + b"".join(number(a) + number(b) + b"\x86K\1\x86N" for a, b in ALIKE) + b"u",
    "sizes-that-hash-alike": b"}("
    + b"".join(call("torch.Size", number(a) + number(b) + b"\x86") + b"N" for a, b in ALIKE)
    + b"u",
    "with-a-name-that-hash-alike": b"}("
    + b"".join(number(a) + number(b) + b"ctorch\nfloat32\n\x87N" for a, b in ALIKE)
    + b"u",
    "complex-numbers-that-hash-alike": call(
        "builtins.set",
        b"](" + b"".join(call("builtins.complex", number(-1000003 * k) + number(k)) for k in range(1, 6001)) + b"e",
    ),
    "keys-of-which-nothing-is-known": b"}("
    + b"".join(call("torch.device", word("cpu") + number(key)) + b"N" for key in range(6000))
    + b"u",
    "sparse": call(
        "torch._utils._rebuild_sparse_tensor",
        b"ctorch.serialization\n_get_layout\n" + word("torch.sparse_coo") + b"\x85R](" + EXPANDED * 2 + b"K\4e",
    ),
    "keys-that-hash-alike": b"}("
    + b"".join(b"\x8a\x0a" + (key * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for key in range(1, 6000))
    + b"u",
}


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", b"3\n")
    return path


def old_format(path: Path, content: bytes) -> Path:
    torch.save(1, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    whole, one = buffer.getvalue(), pickle.dumps(1, 2)
    assert whole.count(one) == 1
    path.write_bytes(whole.replace(one, content))
    return path


@pytest.mark.parametrize("write", [archive, old_format])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_stands_for_more_than_its_bytes_is_refused(tmp_path: Path, name: str, write: Any) -> None:
    path = write(tmp_path / "optimizer.bin", b"\x80\x02" + HOSTILE[name] + b".")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin: expected the state of optimizer 0, .* cannot be read"):
        read_pickle(path, "the state of optimizer 0")


@pytest.mark.parametrize("name", HOSTILE)
def test_so_is_the_index_of_a_state_in_shards(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError):
        check_index(b"\x80\x02" + HOSTILE[name] + b".")


def test_a_text_takes_no_memory_for_a_length_that_the_file_does_not_have() -> None:
    class Sparing(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            assert count is not None
            assert count < 100
            return super().read(count)

    for opcode in (b"X\xff\xff\xff\x7f", b"\x8d" + struct.pack("<Q", 1 << 40)):
        with pytest.raises(ValueError, match="but only 1 remain"):
            check_saved(Sparing(b"\x80\x02" + opcode + b"x"))


def test_weighing_takes_no_memory_for_what_references_stand_for(tmp_path: Path) -> None:
    """Written out, the text would have 60 GB."""
    made = word("x" * 60_000) + b"q\0" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(20))
    begin = time.process_time()
    check_saved_file(archive(tmp_path / "optimizer.bin", b"\x80\x02" + made + b"."))
    assert time.process_time() - begin < 10


def test_the_refusal_says_how_many_values_there_may_be(tmp_path: Path) -> None:
    path = archive(tmp_path / "optimizer.bin", b"\x80\x02" + HOSTILE["lists"] + b".")
    with pytest.raises(CheckpointError, match=r"with its references written out it has more than \d+ values"):
        read_pickle(path, "a state")


def with_attribute() -> torch.Tensor:
    made = torch.ones(2)
    made.note = "of its own"  # type: ignore[attr-defined]
    return made


def with_attributes() -> OrderedDict[str, int]:
    made: OrderedDict[str, int] = OrderedDict(a=1)
    vars(made).update({f"note_{one}": one for one in range(20)} | {"_metadata": OrderedDict()})
    return made


SOUND = {
    "state of NumPy": np.random.get_state(),
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "module": torch.nn.Linear(2, 2).state_dict(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "views": [torch.ones(3)[1:], torch.eye(3).t()],
    "expanded": [torch.ones(1).expand(1000), torch.nn.Parameter(torch.ones(1).expand(9))],
    "with an attribute": with_attribute(),
    "quantized": torch.quantize_per_channel(torch.eye(2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    "large numbers": [(1 << 100) + number for number in range(1000)],
    "sparse": torch.eye(3).to_sparse(),
    "bytes": [b"abc", bytearray(), bytearray(b"xyz"), bytes(range(256))],
    "containers": [{1, 2}, Counter("abba"), OrderedDict(a=(1, 2)), torch.Size([1, 2]), (), [[[]]]],
    "values": [None, True, 1.5, 1j, -1, 1 << 200, "é", torch.device("cpu"), torch.float8_e4m3fn],
    "shared": [[1, 2]] * 1000,
    "moves": [(one % 5 - 2, one % 3 - 2) for one in range(20_000)],
    "keys of numbers": dict.fromkeys(itertools.product(range(-9, 9), repeat=4)),
    "keys of bytes": {b"%d" % one: one for one in range(10_000)},
    "pairs of bytes": {(b"%d" % one, b"x"): one for one in range(10_000)},
    "seeds": [hash((one, 7)) % (1 << 64) + (1 << 62) for one in range(10_000)],
    "attributes": with_attributes(),
    "sizes": {torch.Size([one, 2]): one for one in range(10_000)},
}


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("name", SOUND)
def test_sound_values_are_read(tmp_path: Path, name: str, is_archive: bool) -> None:
    torch.save(SOUND[name], tmp_path / "f", _use_new_zipfile_serialization=is_archive)
    found = read_pickle(tmp_path / "f", "a value")
    expected = torch.load(tmp_path / "f", weights_only=False)
    assert pickle.dumps(found) == pickle.dumps(expected) or repr(found) == repr(expected)


def test_large_states_are_read(tmp_path: Path) -> None:
    names = [f"model.layers.{index}.weight" for index in range(20_000)]
    state = {
        "state": {name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1)} for name in names},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": names}],
        "order": list(range(1_000_000)),
        "labels": ["the same text for many"] * 1_000_000,
    }
    torch.save(state, tmp_path / "f")
    check_saved_file(tmp_path / "f")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps([0] * 100_000, 2)
    assert len(read_pickle(archive(tmp_path / "f", content), "a list")) == 100_000
    archive(tmp_path / "f", content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="a record of it is compressed"):
        read_pickle(tmp_path / "f", "a list")


@pytest.mark.parametrize("name", ["sound", "lists"])
def test_a_part_of_a_file_is_weighed_by_itself(tmp_path: Path, name: str) -> None:
    content = pickle.dumps(1, 2) if name == "sound" else b"\x80\x02" + HOSTILE[name] + b"."
    whole = archive(tmp_path / "f", content).read_bytes()
    part = _create_file_view(io.BytesIO(bytes(100) + whole + bytes(100)), 100, len(whole))
    if name == "sound":
        check_saved(part)
        assert torch.load(part, weights_only=True) == 1
    else:
        with pytest.raises(pickle.UnpicklingError, match="more than"):
            check_saved(part)


def test_records_that_lie_on_each_other_are_refused(tmp_path: Path) -> None:
    archive(tmp_path / "f", bytes(10_000))
    whole = (tmp_path / "f").read_bytes()
    begin, end = whole.index(b"PK\1\2"), whole.index(b"PK\5\6")
    entry = whole[begin : whole.index(b"PK\1\2", begin + 1)]
    directory = entry * 50 + whole[begin + len(entry) : end]
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 51, 51, len(directory), begin, 0)
    with pytest.raises(pickle.UnpicklingError, match=r"its records claim more than its \d+ bytes"):
        check_saved(io.BytesIO(whole[:begin] + directory + tail))


@pytest.mark.parametrize("damage", ["comment", "behind", "before", "directory"])
def test_an_archive_that_two_readers_could_take_for_different_ones_is_refused(tmp_path: Path, damage: str) -> None:
    content = pickle.dumps(1, 2)
    whole = archive(tmp_path / "f", content).read_bytes()
    if damage == "comment":
        whole = whole[:-2] + b"\3\0abc"
    elif damage == "behind":
        whole += b"abc"
    elif damage == "before":
        whole = b"PK\3\4" + whole
    else:
        whole = whole[:-22] + bytes(10) + whole[-22:]
    with pytest.raises(pickle.UnpicklingError, match=r"it is no whole archive as torch.save writes it"):
        check_saved(io.BytesIO(whole))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_record_of_more_than_4_gb_is_measured(tmp_path: Path, is_whole: bool) -> None:
    size, wide = 5 << 30, 0xFFFFFFFF
    whole = archive(tmp_path / "f", pickle.dumps(1, 2)).read_bytes()
    begin, end = whole.index(b"PK\1\2"), whole.index(b"PK\5\6")
    path, extra = b"archive/data/0", struct.pack("<2H3Q", 1, 24, size, size, begin)
    entry = [b"PK\1\2", *[0] * 7, wide, wide, len(path), len(extra), 0, 0, 0, 0, wide]
    directory = whole[begin:end] + struct.pack("<4s6H3I5H2I", *entry) + path + extra
    with (tmp_path / "f").open("r+b") as file:
        place = file.seek(size if is_whole else size - 1000)
        file.write(directory)
        file.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 45, 0, 0, 3, 3, len(directory), place))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, place + len(directory), 1))
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 3, 3, wide, wide, 0))
    assert zipfile.ZipFile(tmp_path / "f").getinfo("archive/data/0").file_size == size
    if is_whole:
        check_saved_file(tmp_path / "f")
    else:
        with pytest.raises(pickle.UnpicklingError, match="its records claim more than its 5368"):
            check_saved_file(tmp_path / "f")


def index(**others: Any) -> Metadata:
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([4]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    )
    return Metadata({"a": tensor}, {"a": ("model", "a")}, {MetadataIndex("a", torch.Size([0])): "place"}, **others)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_sound_index_is_accepted(protocol: int) -> None:
    check_index(pickle.dumps(index(), protocol))


OF_INDEX = "torch.distributed.checkpoint.metadata"


def key(name: bytes, offset: bytes) -> bytes:
    made = f"c{OF_INDEX}\nMetadataIndex\n".encode() + b")\x81}("
    return made + word("fqn") + name + word("offset") + offset + b"ub"


BAD_KEYS = {
    "numbers": key(b"K\1", b"K\2"),
    "numbers-of-a-call": call(f"{OF_INDEX}.MetadataIndex", b"K\1K\2"),
    "parts": call(f"{OF_INDEX}.ChunkStorageMetadata", b"K\1\x85K\1\x85"),
    "pairs": call("collections.OrderedDict", b"](](K\1K\2ee"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_keys_of_an_index_hash_as_nobody_can_foresee(name: str) -> None:
    check_index(b"\x80\x02}" + key(word("weight"), b"K\2") + b"Ns.")
    with pytest.raises(pickle.UnpicklingError):
        check_index(b"\x80\x02}" + BAD_KEYS[name] + b"Ns.")


CHANGES = {
    "a-class": f"c{OF_INDEX}\nMetadataIndex\n".encode() + b"N}" + word("__hash__") + b"Ns\x86b",
    "a-class-by-a-dict": f"c{OF_INDEX}\nMetadataIndex\n".encode() + b"}" + word("__hash__") + b"Nsb",
    "an-object-by-attributes": f"c{OF_INDEX}\nMetadataIndex\n)\x81".encode("latin1") + b"N}" + word("fqn") + b"Ns\x86b",
    "a-value-that-all-have": call(f"{OF_INDEX}._MEM_FORMAT_ENCODING", b"K\0") + b"}" + word("_value_") + b"K\7sb",
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_changes_nothing_but_what_it_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_cpp.checkpoint.sharded_folder import _index_in

    monkeypatch.setattr(MetadataIndex, "__hash__", MetadataIndex.__hash__)  # undone, should it be changed
    with pytest.raises(pickle.UnpicklingError, match=r"it (changes|gives) "):
        _index_in(b"\x80\x02" + CHANGES[name] + b".")
    assert hash(MetadataIndex("a")) == hash(MetadataIndex("a"))
    assert _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0
