"""States in shards: a folder in the format of ``torch.distributed.checkpoint``, for any number of processes to read.

Each process writes its parts of tensors into a file ``__<rank>_0.distcp``; the file ``.metadata`` says which part of
which tensor lies where. Plans of what each process writes are exchanged while training waits, and writing needs no
collective.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from accelerate_cpp.checkpoint.archive import write_archive
from accelerate_cpp.checkpoint.containment import own_file, path_within
from accelerate_cpp.checkpoint.files import SAFE_GLOBALS, ChecksummedFile, FileRecord
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.pickle_weight import check_index, check_saved
from accelerate_cpp.config.text import shortened
from accelerate_cpp.devices.shards import is_sharded_tensor
from accelerate_cpp.errors import CheckpointError

INDEX = ".metadata"
# What an index consists of; nothing else is called or made when one is read.
_OF_INDEX = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\."
    r"(Metadata|MetadataIndex|StorageMeta|TensorProperties|(Tensor|Bytes|Chunk)StorageMetadata|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|_StoragePrefix)"
    r"|torch\.(Size|device|serialization\._get_layout|float\w+|bfloat16|u?int\d+|bool|complex\d+)"
    r"|collections\.OrderedDict|pathlib\.(Pure)?PosixPath"
)


@dataclass(frozen=True)
class ShardedFolder:
    """What this process writes of one state in shards, and what the process that completes the folder writes.

    Attributes:
        name: of the folder, inside the checkpoint.
        file: of this process, inside the folder.
        content: the tensors and bytes that are written there, in the order of ``items``.
        items: what they are, as torch's planner says.
        index: torch's metadata, without the places in the files.
    """

    name: str
    file: str
    content: Sequence[Any]
    items: Sequence[Any]
    index: Any

    def write(self, folder: Path) -> tuple[dict[str, FileRecord], list[Any]]:
        """Writes the file of this process; returns its record, and the places of what is in it."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult

        if (folder / self.name).is_symlink():
            raise CheckpointError(
                f"{folder / self.name}: expected a folder to write into, found a link to one, whose files would be "
                "overwritten: remove the link, or choose another folder"
            )
        (folder / self.name).mkdir(exist_ok=True)  # not those above, which may have been taken away meanwhile
        if not self.items:
            return {}, []
        places, begin = [], 0
        with ChecksummedFile(folder / self.name / self.file) as file:
            for item, value in zip(self.items, self.content, strict=True):
                if isinstance(value, torch.Tensor):
                    write_archive(file, _compact(value))
                else:
                    file.write(value)
                size = file.num_bytes - begin
                places.append(WriteResult(item.index, size, _StorageInfo(self.file, begin, size)))
                begin = file.num_bytes
            return {f"{self.name}/{self.file}": file.finish()}, places

    def write_index(self, folder: Path, places: Sequence[Any]) -> dict[str, FileRecord]:
        """Writes the index, once for all processes, with the places of what they have written."""
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
        from torch.distributed.checkpoint.metadata import StorageMeta

        index = replace(
            self.index,
            storage_data={place.index: place.storage_data for place in places},
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with ChecksummedFile(folder / self.name / INDEX) as file:
            file.write(pickle.dumps(index))
            return {f"{self.name}/{INDEX}": file.finish()}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a storage of their own, as ``torch.save`` writes all of a storage."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def planned(name: str, state: Mapping[str, Any], ranks: Participants) -> ShardedFolder:
    """What this process writes of ``state``. A collective.

    Args:
        state: nested, with tensors of which all processes have the whole, and such of which each has a part.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=ranks.place == 0)
    plans, index = planner.create_global_plan(ranks.gather(planner.create_local_plan()))
    items = planner.finish_plan(plans[ranks.place]).items
    content = [planner.resolve_data(item) for item in items]
    return ShardedFolder(
        name,
        f"__{ranks.place}_0.distcp",
        [value if isinstance(value, torch.Tensor) else value.getvalue() for value in content],
        items,
        index,
    )


_SMALL = 1 << 16  # bytes of a part in which its readers would seek for longer than it takes to read all of it
_MOST_CELLS = 10_000_000  # into which all beginnings and ends of parts cut a tensor
_EMPTY_PLACES = 100_000  # that all lists of a state may have: nothing is stored for empty dicts in them


def _index_in(data: bytes) -> Any:
    """The index in a pickle; whatever exception unpickling raises."""
    check_index(data)
    return _IndexReader(io.BytesIO(data)).load()


def _bytes_of(path: Path, entries: Mapping[tuple[Any, ...], Any]) -> int:
    """The bytes of all tensors in the index ``path``; ``CheckpointError`` if one has no shape that tensors have."""
    tensors = [entry for entry in entries.values() if hasattr(entry, "properties")]
    try:
        return sum(torch.empty(one.size, dtype=one.properties.dtype, device="meta").nbytes for one in tensors)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected shapes and dtypes of tensors, found something else ({error}): load another checkpoint"
        ) from error


def _check_parts(entries: Iterable[Any]) -> None:
    """Raises ``ValueError`` unless the parts of each tensor in an index make up the whole, and none is read twice."""
    seen = set()  # weights and their moments have the same parts
    for entry in {id(one): one for one in entries if hasattr(one, "chunks")}.values():
        size = numpy.array(entry.size, dtype=numpy.int64)
        shape = len(entry.chunks), len(size)
        begins = numpy.array([part.offsets for part in entry.chunks], dtype=numpy.int64).reshape(shape)
        sizes = numpy.array([part.sizes for part in entry.chunks], dtype=numpy.int64).reshape(shape)
        layout = size.tobytes(), begins.tobytes(), sizes.tobytes()
        if layout not in seen and (size >= 0).all():  # else no tensor can be made for it
            seen.add(layout)
            _check_layout(size, begins, sizes)


def _check_layout(size: Any, begins: Any, sizes: Any) -> None:
    """Raises ``ValueError`` unless boxes, one in each row, fill a box that begins at the origin, each place once."""
    ends = begins + sizes
    is_within = (begins >= 0).all() and (sizes >= 0).all() and (ends <= size).all()
    if not is_within or sum(math.prod(box) for box in sizes.tolist()) != math.prod(size.tolist()):
        raise ValueError("parts of a tensor that do not make up the whole")
    has_values = (sizes > 0).all(axis=1)
    begins, ends = begins[has_values], ends[has_values]
    cuts = [numpy.unique(numpy.concatenate([begins[:, axis], ends[:, axis]])) for axis in range(len(size))]
    if math.prod(len(cut) for cut in cuts) > _MOST_CELLS:
        raise ValueError("parts of a tensor that begin at too many places")
    first = [numpy.searchsorted(cut, begins[:, axis]).tolist() for axis, cut in enumerate(cuts)]
    last = [numpy.searchsorted(cut, ends[:, axis]).tolist() for axis, cut in enumerate(cuts)]
    is_taken = numpy.zeros([len(cut) for cut in cuts], dtype=bool)
    for number in range(len(begins)):
        box = tuple(slice(first[axis][number], last[axis][number]) for axis in range(len(size)))
        if is_taken[box].any():
            raise ValueError("parts of a tensor overlap")
        is_taken[box] = True


def _bytes_at(path: Path, places: Collection[Any]) -> int:
    """How many bytes of files the index ``path`` says to read; ``CheckpointError`` if it says so of none or less."""
    if any(getattr(place, "transform_descriptors", None) for place in places):
        raise CheckpointError(
            f"{path}: expected parts as torch.distributed.checkpoint writes them by itself, found parts that an "
            "extension has compressed or changed (transform_descriptors): save without extensions, or load another "
            "checkpoint"
        )
    lengths: list[Any] = [getattr(place, "length", None) for place in places]
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise CheckpointError(f"{path}: expected lengths of parts, found something else: load another checkpoint")
    return sum(lengths)


def _place(steps: Any) -> tuple[Any, ...]:
    """``steps``, as an index has them: the name of the state, a name in it, and names and numbers that lead on.

    Raises:
        ValueError: they are something else.
    """
    place = tuple(steps)
    if len(place) < 2 or not isinstance(place[1], str) or not all(isinstance(step, (str, int)) for step in place):
        raise ValueError(f"{shortened(steps)} leads to no place in a state")
    return place


class _IndexReader(pickle.Unpickler):
    """Reads an index, and calls nothing that does not belong to one."""

    def find_class(self, module: str, name: str) -> Any:
        if not _OF_INDEX.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index contains")
        return super().find_class(module, name)


class SavedShards:
    """A folder in which a state lies in shards.

    Args:
        folder: with the file ``.metadata``.
        prefix: of the state in it: ``"model"`` or ``"optimizer"``.

    Raises:
        CheckpointError: there is no index, it is damaged, or it names a file outside of the folder or one that is
            missing.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self._prefix = folder, prefix
        path = own_file(folder, INDEX)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete; load another one")
        try:
            self._index = _index_in(path.read_bytes())
            places = list(self._index.storage_data.values())
            names = {place.relative_path for place in places}
            self.entries: dict[tuple[Any, ...], Any] = {
                _place(steps): self._index.state_dict_metadata[key]
                for key, steps in self._index.planner_data.items()
                if steps[0] == prefix
            }
            _check_parts(self._index.state_dict_metadata.values())
        except Exception as error:
            raise CheckpointError(
                f"{path}: expected the index of a state in shards, which cannot be read ({error}); it is damaged, or "
                "not from torch.distributed.checkpoint: load another checkpoint"
            ) from error
        for name in names:
            if not path_within(folder, name, path).is_file():
                raise CheckpointError(f"{folder / name} is missing, which {path} names: load another checkpoint")
        # Parts are written one after the other: together they have no more bytes than the files.
        claimed = max(_bytes_of(path, self.entries), _bytes_at(path, places))
        files = [(folder / name).stat() for name in names]
        found = sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())  # a file may have several names
        if claimed > found:
            raise CheckpointError(
                f"{path}: expected files with the {claimed} bytes of its values, found {found} bytes; a file is cut "
                "short, or the index is damaged: load another checkpoint"
            )

    def shapes(self) -> dict[tuple[Any, ...], tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the tensors, by their places in the state."""
        return {
            steps: (entry.size, entry.properties.dtype)
            for steps, entry in self.entries.items()
            if hasattr(entry, "properties")
        }

    def read(
        self,
        target_for: Callable[[tuple[Any, ...], torch.Size, torch.dtype], torch.Tensor],
        is_wanted: Callable[[tuple[Any, ...]], bool] = lambda _: True,
    ) -> dict[Any, Any]:
        """The state. Of tensors in shards, this process only reads its part. No collective.

        Args:
            target_for: called with the place, shape and dtype of each tensor, the memory to read it into.
            is_wanted: called with each place, whether what is there is read at all. What these two raise for places
                that no state has (``IndexError``, ``TypeError`` and the like) is told as damage of the index.

        Raises:
            CheckpointError: a file is damaged.
        """
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        state: dict[Any, Any] = {}
        room = sum(map(len, self.entries)) + _EMPTY_PLACES
        for steps, entry in self.entries.items():
            try:
                if not is_wanted(steps):
                    continue
                is_bytes = isinstance(entry, BytesStorageMetadata)
                value = None if is_bytes else target_for(steps, entry.size, entry.properties.dtype)
                room = _put(state, steps, value, room)
            except (TypeError, ValueError, IndexError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.folder / INDEX}: expected places of values in nested dicts and lists, found "
                    f"{shortened(steps)} ({error}): load another checkpoint"
                ) from error
        self._fill(state)
        return dict(state[self._prefix]) if state else {}

    def _fill(self, state: dict[Any, Any]) -> None:
        """What torch's ``load`` does, without other processes."""
        reader, planner = _reader(self.folder, self._index), _planner()
        try:
            planner.set_up_planner(state, self._index, is_coordinator=True)
            reader.set_up_storage_reader(self._index, is_coordinator=True)
            (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
            (plan,) = reader.prepare_global_plan([plan])
            with torch.sparse.check_sparse_tensor_invariants(True):
                reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{self.folder}: the state in shards cannot be read ({reason}); a part is damaged: load another "
                "checkpoint"
            ) from error


def _put(state: dict[Any, Any], steps: Sequence[Any], value: Any, room: int) -> int:
    """Puts ``value`` into nested dicts and lists, which steps that are strings and numbers lead through.

    Args:
        room: for so many more places in lists; an index of a few bytes must not take much memory.

    Returns:
        The room that is left.

    Raises:
        ValueError: there is too little room, or the steps lead through another value.
    """
    container: Any = state
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(container, list):
            added = max(step + 1 - len(container), 0)
            if step < 0 or added > room:
                raise ValueError(f"place {step} of a list, with room for {room} more places in the lists of the state")
            container.extend([None] * added)
            room -= added
        elif not isinstance(container, dict):
            raise ValueError(f"{step!r} is to be in what is no dict or list")
        if following is None:
            container[step] = value
            return room
        missing = container[step] is None if isinstance(container, list) else step not in container
        if missing:
            container[step] = [] if isinstance(following, int) else {}
        container = container[step]
    return room


def _reader(folder: Path, index: Any) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
            return index

        def _slice_file(self, file: Any, place: Any) -> Any:
            part: Any = super()._slice_file(file, place)  # which torch.load reads then
            if place.length <= _SMALL:
                part = io.BytesIO(part.read(place.length))
            check_saved(part)
            return part

    return Reader(os.fspath(folder))


def _planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            with torch.serialization.safe_globals(SAFE_GLOBALS):
                loaded = torch.load(value, weights_only=True)
            self.state_dict[read_item.dest_index.fqn] = loaded
            if self.flatten_state_dict:
                steps = self.mappings[read_item.dest_index.fqn]
                _put(self.original_state_dict, steps, loaded, room=0)  # the places are there

    return Planner()


def whole_on(rank_keeps: bool, state: Any) -> Any:
    """``state``, nested, with each tensor in shards gathered, one at a time. A collective.

    Args:
        rank_keeps: whether this process gets the values, on the CPU; otherwise their places are empty.
    """
    if isinstance(state, Mapping):
        return {key: whole_on(rank_keeps, value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole_on(rank_keeps, value) for value in state)
    if not isinstance(state, torch.Tensor):
        return state
    gathered: Any = state.full_tensor() if is_sharded_tensor(state) else state.detach()  # type: ignore[attr-defined]
    return gathered.cpu() if rank_keeps else None
