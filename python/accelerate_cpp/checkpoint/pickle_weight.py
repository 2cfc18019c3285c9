"""How much a pickle would build, found out from its opcodes before anything is built.

A few hundred bytes can stand for more values than any memory holds: a list of two references to a list of two
references, and so on. Whatever hashes, copies or walks through such a value takes each reference for a value of its
own, and never ends. Functions that may be called can take memory for a number, and records of an archive can be
compressed. What sound files contain costs as much as their bytes, within a factor; the rest is refused here.
"""

from __future__ import annotations

import _compat_pickle
import gc
import math
import os
import pickle
import pickletools
import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy
import torch

__all__ = ["check_index", "check_saved", "check_saved_file"]

_MOST_VALUES = 10_000_000  # that a small pickle may stand for, as often as they are put into something
_VALUES_PER_BYTE = 10  # of a larger one in addition: a value is in a tensor's place, a dict, a list and so on
_DEEPEST = 500  # containers inside each other; what goes through them calls itself
_ARCHIVE = b"PK\3\4"
_SHORT_BYTES = 1024  # as long as the pickle of one tensor may be
_PICKLES = 5  # in a file of torch's old format, before the bytes of tensors

_ENCODE = "_codecs.encode"
_LATIN = ("latin1", "latin-1")  # the only encodings that pickles of bytes name
# Names of NumPy's dtypes whose elements are no objects, and take memory.
_OF_NUMBERS = re.compile(r"[<>=|]?([biufcmM?]\d{0,9}|[SUV][1-9]\d{0,8})")
_REBUILD = "torch._utils._rebuild"  # of tensors, in which nothing looks for values
_REBUILD_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls a function that it is given
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"  # leaves its tensor as it is
_ITERATE = ("builtins.set", "collections.Counter", "collections.OrderedDict", "torch.Size")
_HASHED_ALIKE = (1 << 61) - 1  # Python's hash of whole numbers is what is left when they are divided by it
_MESH = "torch.distributed.device_mesh.DeviceMesh"  # whose constructor joins or makes process groups
_ORDERED = "collections.OrderedDict"
_OF_KEYS = "torch.distributed.checkpoint.metadata.MetadataIndex"
_KEPT = 16  # keys and values of a dict that are looked at later
_OF_STORAGES = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_qtensor")  # whose first argument is a storage
# What loading asks a tensor or a dict for, and an attribute of this name would answer.
_METHODS = {
    "torch.": frozenset(
        ("numel", "element_size", "untyped_storage", "data_ptr", "stride", "to", "copy_", "detach", "clone")
    ),
    _ORDERED: frozenset(dir(OrderedDict)),
}
_COMPLEX = "builtins.complex"
_ENUMS = ("ZeroStageEnum", "_MEM_FORMAT_ENCODING")  # a process has one of each value, for all


class _Name:
    """Stands for the class or function that a pickle names."""

    __slots__ = ("name",)

    def __init__(self, module: str, name: str) -> None:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))  # as torch does
        self.name = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


class _Made:
    """Stands for a value with others in it, or the result of a call.

    Attributes:
        kind: "tuple", "list", "dict", "set", or "result" of a call.
        weight: how many values it has if every reference is replaced by what it stands for.
        depth: of the containers in it.
        parts: of a tuple; of a small dict, keys and values in turn; of some results, the arguments of the call.
        hashed: Python's hash, as far as it can be foreseen, and another that nobody can foresee; ``None`` if unknown.
        hides: of a dict, or a tuple with dicts, the beginnings of the names of values whose methods the keys would
            hide as attributes.
        unhashed: of a list or tuple, how many values in it have no known hash.
        of: the name of what was called.
        has_expanded: whether it is, or has in it, a tensor of more elements than its storage has.
        has_tensor: of a list, whether there is a tensor, or what may be one, in it.
        is_shared: a reference to it has been taken: it may not grow any more, as its weight has been told.
    """

    __slots__ = (
        *("depth", "has_expanded", "has_tensor", "hashed", "hides", "is_shared", "kind", "of", "parts", "unhashed"),
        "weight",
    )

    def __init__(self, kind: str, weight: int = 1, depth: int = 1, parts: Sequence[Any] = (), of: str = "") -> None:
        self.kind, self.weight, self.depth, self.parts, self.of = kind, weight, depth, parts, of
        self.is_shared = self.has_expanded = self.has_tensor = False
        self.hashed: tuple[int, int] | None = None
        self.hides: tuple[str, ...] = ()
        self.unhashed = 0


class _Storage:
    """Stands for the storage of a tensor, of so many elements."""

    __slots__ = ("elements",)

    def __init__(self, elements: int) -> None:
        self.elements = elements


def check_saved_file(path: Path) -> None:
    """Raises ``UnpicklingError``, or what damage leads to, unless ``torch.load`` can read the file without the cost of
    more than what is in it.
    """
    if os.fspath(path).endswith(".safetensors"):
        return  # torch.load reads no pickle then
    with path.open("rb") as file:
        check_saved(file)


def check_saved(file: IO[bytes]) -> None:
    """:func:`check_saved_file` of a file that is open, from its beginning; leaves it there."""
    file.seek(0)
    if file.read(len(_ARCHIVE)) == _ARCHIVE:
        _check_records(file)
        file.seek(0)
        # The reader that torch.load uses: another one could find another pickle.
        data = torch._C.PyTorchFileReader(file).get_record("data.pkl")
        if len(data) <= _SHORT_BYTES:
            _check_short(data)
        else:
            _check(data, is_index=False)
    else:
        pickles = _Bounded(file)
        for _ in range(_PICKLES):
            _check(pickles, is_index=False)
            if not file.read(1):  # the reader will tell what is missing
                break
            file.seek(-1, os.SEEK_CUR)
    file.seek(0)


class _Bounded:
    """A file from its beginning, which takes no memory for more bytes than it has."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._size = file, _size_of(file)
        file.seek(0)
        self.readline, self.tell = file.readline, file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size - self._file.tell()))


def _size_of(file: IO[bytes]) -> int:
    file.seek(0, os.SEEK_END)  # what it returns is no place in a part of a file, as torch opens one
    return file.tell()


def check_index(data: bytes) -> None:
    """Raises ``UnpicklingError``, or what damage leads to, unless the index of a state in shards can be unpickled
    without the cost of more than what is in it, and changes nothing but what it makes.
    """
    _check(data, is_index=True)


def _check_records(file: IO[bytes]) -> None:
    """Raises ``UnpicklingError`` unless the records of an archive lie in it as they are, beside each other.

    Archives that can be taken for two different ones, depending on where a reader looks for their directory, are
    refused.
    """
    size = _size_of(file)
    file.seek(max(size - 98, 0))
    tail = file.read()
    signature, _, _, _, count, length, place, comment = struct.unpack("<4s4H2IH", tail[-22:].rjust(22))
    ends = size - 22
    if tail[-42:-38] == b"PK\6\7":
        ends = size - 98
        (known,) = struct.unpack("<Q", tail[-34:-26])
        wide, _, _, _, _, _, _, count, length, place = struct.unpack("<4sQ2H2I4Q", tail[-98:-42].rjust(56))
        signature = signature if known == ends and wide == b"PK\6\6" else b""
    if signature != b"PK\5\6" or comment or place + length != ends:
        raise pickle.UnpicklingError("it is no whole archive as torch.save writes it")
    file.seek(place)
    directory, begin, total = file.read(length), 0, 0
    for _ in range(count):
        found, _, _, flags, method, _, _, _, stored, whole, name, extra, remark, *_ = struct.unpack_from(
            "<4s6H3I5H2I", directory, begin
        )
        begin += 46 + name + extra + remark
        if found != b"PK\1\2" or method or flags & 1:
            raise pickle.UnpicklingError("a record of it is compressed, as torch.save never does")
        if stored == whole == 0xFFFFFFFF:
            stored, whole = _wide_sizes(directory[begin - extra - remark : begin - remark])
        total += whole
        if stored != whole or total > size:
            raise pickle.UnpicklingError(f"its records claim more than its {size} bytes")


def _wide_sizes(extra: bytes) -> tuple[int, int]:
    """Both sizes of a record, as it is and as it is stored, that take fields of 64 bits."""
    while extra:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            whole, stored = struct.unpack_from("<2Q", extra, 4)
            return stored, whole
        extra = extra[4 + length :]
    raise pickle.UnpicklingError("a record of it has no size")


@lru_cache(maxsize=1024)
def _check_short(data: bytes) -> None:
    """Parts of a state have the same pickle where they have the same dtype and shape."""
    _check(data, is_index=False)


def _check(source: Any, is_index: bool) -> None:
    machine = _Machine(is_index)
    steps = machine.steps
    # No stand-in is in a cycle, and the collector would go through all of them again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        for opcode, argument, place in pickletools.genops(source):
            machine.place = place or 0
            step = steps.get(opcode.name)
            if step is None:
                raise pickle.UnpicklingError(f"Unsupported operand {opcode.name}, which no state contains")
            step(argument)
    finally:
        steps.clear()  # they hold the machine, whose stand-ins would live until the next collection
        if collects:
            gc.enable()


class _Machine:
    """Does what opcodes say, with stand-ins for values."""

    def __init__(self, is_index: bool) -> None:
        self._is_index = is_index
        self.place = 0  # of the opcode, in the pickle or in the file
        self._written = 0
        self._compared = 0  # values of which each could be compared with all of them before it
        self._hashes: dict[int, int] = {}  # the first value of each hash that can be foreseen, by its other one
        self._alike: dict[int, set[int]] = {}  # all of them, where there are several
        self._storages: dict[Any, int] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []  # places on the stack
        self._memo: dict[int, Any] = {}
        push = self._stack.append
        plain = (
            *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT"),
            *("STRING", "BINSTRING", "SHORT_BINSTRING"),
            *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
            *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        )
        self.steps: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(plain, push),
            **dict.fromkeys(("LONG1", "LONG4"), self._number),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self._get),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "EMPTY_TUPLE": lambda _: push(_Made("tuple")),
            "EMPTY_LIST": lambda _: push(_Made("list")),
            "EMPTY_DICT": lambda _: push(_Made("dict")),
            "EMPTY_SET": lambda _: push(_Made("set")),
            "TUPLE": lambda _: self._tuple(self._from_mark()),
            "TUPLE1": lambda _: self._tuple(self._last(1)),
            "TUPLE2": lambda _: self._tuple(self._last(2)),
            "TUPLE3": lambda _: self._tuple(self._last(3)),
            "APPEND": lambda _: self._grow(self._last(1)),
            "APPENDS": lambda _: self._grow(self._from_mark()),
            "SETITEM": lambda _: self._set_items(self._last(2)),
            "SETITEMS": lambda _: self._set_items(self._from_mark()),
            "ADDITEMS": lambda _: self._add_items(self._from_mark()),
            "GLOBAL": lambda names: push(_Name(*names.partition(" ")[::2])),
            "STACK_GLOBAL": lambda _: push(_Name(*map(str, self._last(2)))),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), self._call),
            "BUILD": self._build,
            "BINPERSID": self._storage,
            "STOP": self._stop,
        }

    def _last(self, count: int) -> list[Any]:
        """Takes so many values from the stack."""
        taken = self._stack[-count:]
        if len(taken) < count:
            raise pickle.UnpicklingError("its stack is empty")
        del self._stack[-count:]
        return taken

    def _from_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _put(self, number: int) -> None:
        if number > self.place:  # the unpickler takes memory for all places before this one
            raise pickle.UnpicklingError(f"it uses place {number} of a table with at most {self.place}")
        self._memo[number] = self._stack[-1]

    def _get(self, number: int) -> None:
        value = self._memo[number]
        if type(value) is _Made:
            value.is_shared = True
        self._stack.append(value)

    def _into(self, values: Sequence[Any]) -> tuple[int, int]:
        """The weight of values that are put into another one, and the depth of that."""
        weight, depth = 0, 0
        for value in values:
            if type(value) is _Made:
                weight += value.weight
                if value.depth > depth:
                    depth = value.depth
            else:
                weight += 1
        self._pay(weight)
        if depth >= _DEEPEST:
            raise pickle.UnpicklingError(f"its values are nested more than {_DEEPEST} times")
        return weight, depth + 1

    def _pay(self, cost: int) -> None:
        self._written += cost
        most = _MOST_VALUES + _VALUES_PER_BYTE * self.place
        if self._written > most:
            raise pickle.UnpicklingError(f"with its references written out it has more than {most} values")

    def _number(self, number: int) -> None:
        if abs(number) >= _HASHED_ALIKE:
            self._note_hash(_hashed(number))
        self._stack.append(number)

    def _note_hash(self, hashed: tuple[int, int] | None) -> None:
        """Pays for the values that have the same hash, as a dict would compare this one with each of them."""
        if hashed is not None:
            first = self._hashes.setdefault(*hashed)
            if first != hashed[1]:
                alike = self._alike.setdefault(hashed[0], {first})
                if hashed[1] not in alike:
                    self._pay(len(alike))
                    alike.add(hashed[1])

    def _compare(self, count: int) -> None:
        """Pays for values that, as keys of a dict, could each be compared with all such values before it."""
        self._pay(count * self._compared + count * (count + 1) // 2)
        self._compared += count

    def _tuple(self, parts: Sequence[Any]) -> None:
        weight, depth = self._into(parts)
        made = _Made("tuple", 1 + weight, depth, parts)
        self._stack.append(made)
        made.hashed = _hash_of_numbers(parts)
        if made.hashed is not None:  # most are shapes
            self._note_hash(made.hashed)
            return
        made.has_expanded = _has_expanded(parts)
        made.hashed = _hash_of_all(parts)
        made.unhashed = sum(map(_num_unhashed, parts))
        made.hides = tuple(name for one in parts if type(one) is _Made and one.hides for name in one.hides)
        self._note_hash(made.hashed)

    def _own(self) -> _Made:
        """What is on the stack and may still grow."""
        target = self._stack[-1]
        if type(target) is not _Made or target.kind == "tuple":
            raise pickle.UnpicklingError("it changes what it has not made")
        if target.is_shared:
            raise pickle.UnpicklingError("it changes what it has used already, or a value in it contains itself")
        return target

    def _grow(self, values: Sequence[Any]) -> None:
        weight, depth = self._into(values)
        target = self._own()
        target.weight += weight
        target.depth = max(target.depth, depth)
        target.has_expanded = target.has_expanded or _has_expanded(values)
        if target.kind == "list":
            target.unhashed += sum(map(_num_unhashed, values))
            target.has_tensor = target.has_tensor or any(
                type(one) is _Made and one.of.startswith("torch.") for one in values
            )

    def _set_items(self, values: Sequence[Any]) -> None:
        self._look_at_keys(values[::2])
        self._grow(values)
        target = self._stack[-1]
        if target.kind != "dict":
            return
        if len(target.parts) < _KEPT:
            target.parts = [*target.parts, *values[:_KEPT]]
        target.hides += tuple(
            begin
            for begin, methods in _METHODS.items()
            if begin not in target.hides and any(type(key) is str and key in methods for key in values[::2])
        )

    def _add_items(self, values: Sequence[Any]) -> None:
        self._look_at_keys(values)
        self._grow(values)

    def _look_at_keys(self, keys: Sequence[Any]) -> None:
        for key in keys:
            self._compare(_num_unhashed(key))
            if self._is_index and type(key) is _Made and key.kind != "tuple" and key.of != _OF_KEYS:
                raise pickle.UnpicklingError(f"it has a {key.of or key.kind} for a key, which no index has")

    def _call(self, _: Any) -> None:
        function, arguments = self._last(2)
        parts = arguments.parts if type(arguments) is _Made and arguments.kind == "tuple" else None
        name = function.name if type(function) is _Name else ""
        if parts is None or not self._may_be_called(name, parts):
            raise pickle.UnpicklingError(f"it calls {name or 'a value'} with arguments that no state has")
        weight, depth = self._into([arguments])
        if name.startswith((_REBUILD, _REBUILD_TYPE)):
            weight, depth = 0, 1
        made = _Made("result", 1 + weight, depth, parts if name in (_ENCODE, "numpy.dtype") else (), name)
        if name == "torch.Size" and parts:
            made.hashed = parts[0].hashed
        elif name == _COMPLEX:
            made.hashed = _hash_of_complex(parts)
            self._note_hash(made.hashed)
        made.has_expanded = _has_expanded(parts) or _makes_expanded(name, parts)
        self._stack.append(made)

    def _may_be_called(self, name: str, parts: Sequence[Any]) -> bool:
        """Whether the call takes no more memory than its arguments."""
        if not parts:
            return True
        if name == _MESH:
            return False
        if self._is_index and name == _ORDERED:
            return False  # of keys that were not looked at
        if name == _OF_KEYS:
            return type(parts[0]) is str
        if name == _REBUILD_TYPE:
            called: Any = parts[0]
            given: Any = parts[2] if len(parts) > 2 else None
            if type(called) is not _Name or type(given) is not _Made or given.kind != "tuple":
                return False
            if _hides_methods(parts[3:]):
                return False
            return called.name.startswith(_REBUILD) and self._may_be_called(called.name, given.parts)
        if name.startswith(_REBUILD_PARAMETER) and _hides_methods(parts):
            return False
        if name in _ITERATE and any(type(one) is _Made and one.of.startswith("torch.") for one in parts):
            return False  # each element of a tensor would become a tensor
        if name == "torch.Size":
            return type(parts[0]) is _Made and parts[0].kind == "tuple"
        if name in _ITERATE:
            if name == _ORDERED and any(type(one) is _Made and one.has_tensor for one in parts):
                return False
            self._compare(sum(one.unhashed for one in parts if type(one) is _Made))
        if name.startswith(_REBUILD) and not name.startswith(_REBUILD_PARAMETER) and _has_expanded(parts):
            return False  # each element would be written out
        if name in ("builtins.bytearray", _ENCODE):
            text, *encoding = parts
            if type(text) is _Made and text.of == _ENCODE:
                (text, *_) = text.parts
            if not isinstance(text, (str, bytes)):  # a number of bytes
                return False
            self._pay(len(text))
            return all(one in _LATIN for one in encoding)
        if name.endswith(".multiarray._reconstruct"):  # an array of NumPy, which gets its shape with its bytes
            shape = parts[1] if len(parts) == 3 else None
            return type(shape) is _Made and list(shape.parts) == [0]
        if name == "numpy.dtype":
            return isinstance(parts[0], str) and _OF_NUMBERS.fullmatch(parts[0]) is not None
        return not (name == "numpy.ndarray" or (name.startswith("torch.") and name.endswith(("Tensor", "Storage"))))

    def _build(self, _: Any) -> None:
        (state,) = self._last(1)
        weight, depth = self._into([state])
        target = self._own()
        is_plain = type(state) is _Made and state.kind == "dict"
        if target.kind != "result" or target.of.endswith(_ENUMS):
            raise pickle.UnpicklingError(f"it changes {target.of or 'a container'}, which is not its own")
        if self._is_index and not is_plain and not target.of.endswith(".TensorProperties"):
            raise pickle.UnpicklingError(f"it gives a {target.of} a state that is no dict")
        if not self._may_have(target, state):
            raise pickle.UnpicklingError(f"it gives a {target.of} a state that none has")
        may_be_tensor = target.of.startswith((_REBUILD, _REBUILD_TYPE)) or (
            target.of.startswith("torch.") and target.of.endswith(("Tensor", "Storage", "Parameter"))
        )
        target.has_expanded = target.has_expanded or may_be_tensor  # it may get another shape
        target.weight += weight
        target.depth = max(target.depth, depth)

    def _may_have(self, target: _Made, state: Any) -> bool:
        """Whether ``state``, of a kind that may be one, is what an object like ``target`` can have."""
        is_dict = type(state) is _Made and state.kind == "dict"
        if target.of == "collections.Counter":
            return False
        if target.of == _ORDERED:  # an attribute could hide one of its methods
            return not self._is_index and is_dict and _ORDERED not in state.hides
        if target.of == _OF_KEYS:
            names = dict(zip(state.parts[::2], state.parts[1::2], strict=True)) if is_dict else {}
            return len(state.parts) < _KEPT and type(names.get("fqn")) is str
        if target.of.startswith("numpy.dtypes."):
            return False
        if target.of == "numpy.dtype":
            return type(state) is _Made and _is_state_of_dtype(str(target.parts[0]), state.parts)
        return True

    def _storage(self, _: Any) -> None:
        (place,) = self._last(1)
        parts = place.parts if type(place) is _Made else ()  # ("storage", class, key, device, elements)
        elements = parts[4] if len(parts) > 4 and type(parts[4]) is int else 0
        key = parts[2] if len(parts) > 2 and isinstance(parts[2], (str, int)) else None
        if self._storages.setdefault(key, elements) != elements:  # the reader has only one of each name
            raise pickle.UnpicklingError("it gives one storage two sizes")
        self._stack.append(_Storage(elements))

    def _stop(self, _: Any) -> None:
        if len(self._stack) != 1 or self._marks:
            raise pickle.UnpicklingError("it has more values than one")


def _has_expanded(values: Sequence[Any]) -> bool:
    return any(type(value) is _Made and value.has_expanded for value in values)


def _makes_expanded(name: str, parts: Sequence[Any]) -> bool:
    """Whether a tensor that is made of these arguments, such as a storage and a shape, has more elements than it."""
    if len(parts) < 3:
        return False
    storage, shape = parts[0], parts[2]
    if type(storage) is _Name and type(shape) is _Made:  # a function that makes it, and its arguments
        return _makes_expanded(storage.name, shape.parts)
    if type(storage) is not _Storage:
        return name.startswith(_OF_STORAGES)
    if type(shape) is not _Made or shape.kind != "tuple" or not all(type(size) is int for size in shape.parts):
        return True  # it is not known
    elements: int = math.prod(shape.parts)
    return elements > storage.elements


def _hides_methods(states: Sequence[Any]) -> bool:
    """Whether attributes of a tensor hide methods, so that whoever asks it for its shape is told something else."""
    return any(type(state) is _Made and "torch." in state.hides for state in states)


class _Hash:
    """Is hashed as it is told."""

    __slots__ = ("_hash",)

    def __init__(self, hashed: int) -> None:
        self._hash = hashed

    def __hash__(self) -> int:
        return self._hash


def _hashed(value: Any) -> tuple[int, int] | None:
    """Python's hash of a value, and one that comes from the secret with which Python hashes bytes."""
    if type(value) is _Made:
        if value.of == _ENCODE:
            return _hashed(value.parts[0])
        return value.hashed
    if type(value) is _Name:
        return hash(value.name), hash(value.name)
    if type(value) is int:
        return hash(value), hash(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if type(value) is float:
        return hash(value), hash(struct.pack("<d", value))
    return None if type(value) is _Storage else (hash(value), hash(value))


def _hash_of_numbers(parts: Sequence[Any]) -> tuple[int, int] | None:
    """:func:`_hash_of_all` where all are numbers of at most 64 bits."""
    for part in parts:
        if type(part) is not int:
            return None
    try:
        return hash(tuple(parts)), hash(array("q", parts).tobytes())
    except OverflowError:
        return None


def _hash_of_all(parts: Sequence[Any]) -> tuple[int, int] | None:
    known = [_hashed(part) for part in parts]
    if None in known:
        return None
    return hash(tuple(_Hash(one[0]) for one in known if one)), hash(tuple(one[1] for one in known if one))


def _hash_of_complex(parts: Sequence[Any]) -> tuple[int, int] | None:
    if not all(type(part) in (int, float) for part in parts) or len(parts) > 2:
        return None
    fields = _hash_of_all(parts)
    return None if fields is None else (hash(complex(*parts)), fields[1])


def _num_unhashed(value: Any) -> int:
    """How many values are in it, or are it, whose hash is not known; those of tensors are their addresses."""
    if type(value) is not _Made or value.of.startswith((_REBUILD, _REBUILD_TYPE)):
        return 0
    if value.kind in ("list", "tuple"):
        return value.unhashed
    return int(value.kind == "result" and value.of not in (_ENCODE, _OF_KEYS) and value.hashed is None)


def _is_state_of_dtype(name: str, state: Sequence[Any]) -> bool:
    """Whether NumPy gives a dtype of this name such a state, in either order of bytes."""
    own = numpy.dtype(name).__reduce__()[2]
    return (
        len(state) == len(own)
        and state[0] == own[0]
        and state[1] in ("<", ">", "|", "=")
        and [*state[2:8]] == [*own[2:8]]
        and all(type(more) is _Made and more.kind == "tuple" for more in state[8:])  # the unit of times
    )
