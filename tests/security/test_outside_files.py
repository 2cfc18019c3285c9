"""Whatever a checkpoint or an offload folder contains, no file outside of it is read, and nothing waits for a pipe."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelerate_cpp import Accelerator, load_checkpoint_in_model
from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.files import read_pickle
from accelerate_cpp.checkpoint.safetensors_file import read_safetensors
from accelerate_cpp.checkpoint.sharded_folder import INDEX, SavedShards, ShardedFolder, _check_parts
from accelerate_cpp.checkpoint.shards import save_in_shards
from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, offload_state_dict
from accelerate_cpp.utils import merge_fsdp_weights, save
from make_seeds import shards_file, shards_index

OUTSIDE = r"(link to|points outside|expected a file in).*"
ITS_FILES = ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "accelerate_cpp.json"]


def prepared() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    return accelerator


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Accelerator, Path]:
    accelerator = prepared()
    accelerator.save_state(tmp_path / "checkpoint")
    return accelerator, tmp_path / "checkpoint"


def moved_out(path: Path) -> None:
    """A link to a file that has been moved out of the folder takes its place."""
    outside = path.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(f"../outside/{path.name}")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("name", ITS_FILES)
def test_load_state_follows_no_link_out_of_the_folder(
    saved: tuple[Accelerator, Path], name: str, has_manifest: bool
) -> None:
    accelerator, folder = saved
    moved_out(folder / name)
    if not has_manifest and name != "accelerate_cpp.json":
        (folder / "accelerate_cpp.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{name}.*{OUTSIDE}"):
        accelerator.load_state(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_load_state_does_not_wait_for_a_pipe(saved: tuple[Accelerator, Path], name: str) -> None:
    accelerator, folder = saved
    (folder / "accelerate_cpp.json").unlink()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}"):
        accelerator.load_state(folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_reading_weights_does_not_wait_for_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((CheckpointError, InvalidArgument), match=r"found (a folder, a pipe|none of them)"):
        load_checkpoint_in_model(nn.Linear(2, 1), tmp_path)


def test_links_inside_a_checkpoint_and_to_the_whole_of_it_are_followed(saved: tuple[Accelerator, Path]) -> None:
    accelerator, folder = saved
    (folder / "elsewhere").mkdir()
    (folder / "optimizer.bin").rename(folder / "elsewhere" / "optimizer.bin")
    (folder / "optimizer.bin").symlink_to("elsewhere/optimizer.bin")
    (folder.parent / "newest").symlink_to(folder)
    accelerator.load_state(folder.parent / "newest")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["a.safetensors.index.json", "part.safetensors"])
def test_weights_are_read_from_no_file_outside_of_the_folder_that_an_index_names(weights: Path, name: str) -> None:
    (weights / "model.safetensors").rename(weights / "part.safetensors")
    where = dict.fromkeys(("weight", "bias"), "part.safetensors")
    (weights / "a.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    load_checkpoint_in_model(nn.Linear(2, 1), weights)
    moved_out(weights / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*{OUTSIDE}"):
        load_checkpoint_in_model(nn.Linear(2, 1), weights)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_weights_in_a_folder_that_the_program_names_may_be_a_link_to_anywhere(weights: Path, name: str) -> None:
    if name.endswith(".bin"):
        (weights / "model.safetensors").unlink()
        torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, weights / name)
    moved_out(weights / name)
    model = nn.Linear(2, 1)
    load_checkpoint_in_model(model, weights)
    assert model.weight.tolist() == [[1, 1]]


def test_an_offload_folder_leads_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "offloaded"
    offload_state_dict(folder, {"a": torch.ones(2)})
    moved_out(folder / "a.dat")
    with pytest.raises(CheckpointError, match=OUTSIDE):
        OffloadedWeightsLoader(save_folder=folder)["a"]
    save_file({"a": torch.ones(2)}, tmp_path / "outside" / "b.safetensors")
    for path in (str(tmp_path / "outside" / "b.safetensors"), "../outside/b.safetensors", "/dev/zero", "a\0b"):
        (folder / "index.json").write_text(json.dumps({"a": {"safetensors_file": path}}))
        with pytest.raises(CheckpointError, match=r"index\.json says that 'a' is in .* expected a file in"):
            OffloadedWeightsLoader(save_folder=folder)
    # What a program itself passes is no content of a file.
    index = {"a": {"safetensors_file": str(tmp_path / "outside" / "b.safetensors")}}
    assert OffloadedWeightsLoader(save_folder=folder, index=index)["a"].tolist() == [1, 1]


def test_an_offload_folder_may_name_its_own_safetensors_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    (tmp_path / "index.json").write_text(json.dumps({"a": {"safetensors_file": str(tmp_path / "b.safetensors")}}))
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("key", ["\ud800", "a" * 300])
def test_a_tensor_that_no_file_can_be_named_after_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({key: {"dtype": "float32", "shape": [2]}}))
    with pytest.raises(CheckpointError, match="expected the name of a file, but no file can have that"):
        OffloadedWeightsLoader(save_folder=tmp_path)[key]
    entry = {"safetensors_file": str(tmp_path / key)}
    (tmp_path / "index.json").write_text(json.dumps({"a": entry}))
    with pytest.raises(CheckpointError, match=r"index\.json says that 'a' is in .* expected a file in"):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]


def test_the_folder_of_a_state_in_shards_may_be_no_link_either(saved: tuple[Accelerator, Path]) -> None:
    accelerator, folder = saved
    (folder / "accelerate_cpp.json").unlink()
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / INDEX).write_bytes(shards_index())
    (folder / "pytorch_model_fsdp_0").symlink_to("../outside")
    with pytest.raises(CheckpointError, match=OUTSIDE):
        accelerator.load_state(folder)


@pytest.mark.parametrize(
    "read", [lambda folder: SavedShards(folder, "model"), lambda f: merge_fsdp_weights(f, f / "out")]
)
@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_the_index_of_a_state_in_shards_leads_nowhere_else(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 100)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / INDEX).write_bytes(shards_index(name))
    with pytest.raises(CheckpointError, match=OUTSIDE):
        read(folder)


@contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """This process may take so much more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_an_index_of_a_few_bytes_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(shards_file())

    def refusal(content: bytes) -> str:
        (tmp_path / INDEX).write_bytes(content)
        with pytest.raises(CheckpointError) as caught, at_most(256 << 20):
            SavedShards(tmp_path, "model").read(lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
        return str(caught.value)

    assert "place 2147483647 of a table" in refusal(b"\x80\x04]r\xff\xff\xff\x7f.")
    assert "expected files with the" in refusal(shards_index(size=(1 << 40, 1 << 20)))
    assert "place 1099511627776 of a list, with room for" in refusal(shards_index(steps=("model", "x", 1 << 40)))
    # Each of these lists would be small enough.
    assert "place 99999 of a list, with room for" in refusal(shards_index(steps=("model", "x", *[99999] * 1000)))


def refusal_of(folder: Path, index: Metadata) -> str:
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        SavedShards(folder, "model").read(lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    return str(caught.value)


def test_parts_that_an_extension_has_compressed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(shards_file())
    index = pickle.loads(shards_index(size=(1 << 40,)))
    (place,) = index.storage_data.values()
    place.transform_descriptors = ["zstd"]
    assert "(transform_descriptors): save without extensions" in refusal_of(tmp_path, index)


def test_a_part_is_not_read_for_many_values(tmp_path: Path) -> None:
    torch.save(bytearray(100_000), tmp_path / "__0_0.distcp")
    length = (tmp_path / "__0_0.distcp").stat().st_size

    def index(count: int) -> Metadata:
        names = [f"model.{number}" for number in range(count)]
        return Metadata(
            {name: BytesStorageMetadata() for name in names},
            {name: ("model", name.removeprefix("model.")) for name in names},
            {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, length) for name in names},
        )

    (tmp_path / INDEX).write_bytes(pickle.dumps(index(1)))
    assert SavedShards(tmp_path, "model").read(torch.empty) == {"0": bytearray(100_000)}
    refused = rf"expected files with the {2 * length} bytes of its values, found {length} bytes"
    assert re.search(refused, refusal_of(tmp_path, index(2)))


@pytest.mark.parametrize("length", [None, -1, "4", 1.5])
def test_a_length_that_no_part_has_is_told_as_damage(tmp_path: Path, length: object) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(shards_file())
    index = pickle.loads(shards_index())
    (place,) = index.storage_data.values()
    del place.length
    if length is not None:
        place.length = length
    assert "expected lengths of parts, found something else" in refusal_of(tmp_path, index)


@pytest.mark.parametrize("size", [(0, 1 << 62, 4), (1 << 62, 1 << 62), (-1,)])
def test_a_shape_that_no_tensor_has_is_told_as_damage(tmp_path: Path, size: tuple[int, ...]) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(shards_file())
    assert "expected shapes and dtypes of tensors" in refusal_of(tmp_path, pickle.loads(shards_index(size=size)))


def test_a_part_of_a_state_in_shards_is_weighed_before_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "__0_0.distcp", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps([0] * 100_000, 2))
        file.writestr("archive/version", b"3\n")
    index = pickle.loads(shards_index(size=()))
    (place,) = index.storage_data.values()
    place.length = (tmp_path / "__0_0.distcp").stat().st_size
    assert "a record of it is compressed" in refusal_of(tmp_path, index)


@pytest.mark.parametrize(
    "steps",
    [
        ("model",),
        ("model", 0),
        ("model", None),
        ("model", ("weight",)),
        ("model", "weight", -1),
        ("optimizer",),
        ("optimizer", 0),
        ("optimizer", "state"),
        ("optimizer", "state", 0),
        ("optimizer", "state", ["weight"]),
        ("optimizer", "param_groups"),
        ("optimizer", "param_groups", 0, "params"),
    ],
)
def test_a_place_that_no_state_has_is_told_as_damage(
    saved: tuple[Accelerator, Path], steps: tuple[object, ...]
) -> None:
    accelerator, folder = saved
    for name in ("accelerate_cpp.json", "optimizer.bin" if steps[0] == "optimizer" else "model.safetensors"):
        (folder / name).unlink()
    shards = folder / ("optimizer_0" if steps[0] == "optimizer" else "pytorch_model_fsdp_0")
    shards.mkdir()
    (shards / "__0_0.distcp").write_bytes(shards_file())
    (shards / INDEX).write_bytes(shards_index(steps=steps))
    with pytest.raises(CheckpointError, match=rf"{shards.name}"):
        accelerator.load_state(folder)


def test_an_engine_of_deepspeed_reads_its_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "pytorch_model").mkdir(parents=True)
    torch.save({"a": torch.ones(1)}, tmp_path / "states.pt")
    (folder / "pytorch_model" / "states.pt").symlink_to("../../states.pt")
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model" / "sound.pt")
    read: list[object] = []

    class Engines:
        def load_engines(self, models: object, where: Path, tags: object, reading: Callable[..., object]) -> None:
            read.append(reading(where / "pytorch_model" / "sound.pt", "cpu", ()))
            for name in ("pytorch_model/states.pt", "../states.pt"):
                with pytest.raises(CheckpointError, match=r"(link to|points outside)"):
                    reading(where / name, "cpu", ())

    EngineStates(Engines(), [], {}).read(folder)  # type: ignore[arg-type]
    assert len(read) == 1


@pytest.mark.parametrize("name", ["rank0/link", "rank0/pipe", "folder", "zero"])
def test_an_engine_of_deepspeed_gets_no_folder_with_other_than_its_files(tmp_path: Path, name: str) -> None:
    tag = tmp_path / "checkpoint" / "pytorch_model"
    (tag / "offloaded_tensors" / "rank0").mkdir(parents=True)
    (tag / "offloaded_tensors" / "rank0" / "a.swp").write_bytes(b"1234")
    (tag / "offloaded_tensors" / "b.swp").symlink_to("rank0/a.swp")
    loaded: list[object] = []

    class Engines:
        def load_engines(self, models: object, *_: object) -> None:
            loaded.append(models)

    states = EngineStates(Engines(), [None], {})  # type: ignore[arg-type]
    states.read(tag.parent)
    path = tag / "offloaded_tensors" / name
    if name.endswith("pipe"):
        os.mkfifo(path)
    else:
        path.symlink_to({"rank0/link": "/etc/hostname", "folder": "../offloaded_tensors", "zero": "/dev/zero"}[name])
    with pytest.raises(CheckpointError, match=rf"{name}.*(outside the folder|found a link to a folder, a pipe)"):
        states.read(tag.parent)
    assert loaded == [[None]]


def write_offloaded(folder: Path) -> None:
    offload_state_dict(folder, {"a": torch.ones(1)})


def write_shards(folder: Path) -> None:
    save_in_shards({"a": torch.ones(1), "b": torch.ones(1)}, folder, max_shard_size=4)


def write_object(folder: Path) -> None:
    save({"a": torch.ones(1)}, folder / "object.bin")


def write_merged(folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "shards" / INDEX).write_bytes(shards_index())
    (folder / "shards" / "__0_0.distcp").write_bytes(shards_file())
    merge_fsdp_weights(folder / "shards", folder)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_offloaded, ["a.dat", "index.json"]),
        (write_shards, ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]),
        (write_object, ["object.bin"]),
        (write_merged, ["model.safetensors"]),
    ],
)
def test_a_link_that_waits_for_a_save_leads_it_to_no_other_file(
    tmp_path: Path, write: Callable[[Path], object], names: list[str]
) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "folder").mkdir()
    for name in (f"merging-{os.getpid()}.tmp", *(f".{name}.tmp-{os.getpid()}" for name in names)):
        (tmp_path / "folder" / name).symlink_to(tmp_path / "victim")
    write(tmp_path / "folder")
    assert (tmp_path / "victim").read_text() == "kept"
    assert all((tmp_path / "folder" / name).is_file() for name in names)


def test_a_safetensors_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is missing|found a folder, a pipe or a device"):
        read_safetensors(tmp_path / "model.safetensors")


class WithAttributes:
    """Is pickled as an ``OrderedDict`` of which an attribute hides the method ``values``."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self._items = items

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"values": OrderedDict}, None, iter(self._items.items())


def test_an_index_hides_no_place_from_the_look_at_its_names(saved: tuple[Accelerator, Path]) -> None:
    accelerator, folder = saved
    (folder / "accelerate_cpp.json").unlink()
    (folder / "model.safetensors").unlink()
    shards = folder / "pytorch_model_fsdp_0"
    shards.mkdir()
    names = ["weight", "bias"]
    for name, value in {"weight": torch.full((1, 2), 7.0), "bias": torch.full((1,), 7.0)}.items():
        torch.save(value, folder.parent / name)
    places = {MetadataIndex(f"model.{name}"): _StorageInfo(f"../../{name}", 0, 10_000) for name in names}
    index = Metadata(
        {f"model.{name}": BytesStorageMetadata() for name in names},
        {f"model.{name}": ("model", name) for name in names},
        WithAttributes(places),
    )
    (shards / INDEX).write_bytes(pickle.dumps(index, protocol=2))
    with pytest.raises(CheckpointError, match="a state that none has"):
        accelerator.load_state(folder)


def index_of(parts: list[tuple[int, int]], name: str = "__0_0.distcp", key: str = "model.x") -> Metadata:
    """Of one tensor with four elements in parts that begin somewhere and have a size."""
    chunks = [ChunkStorageMetadata(torch.Size([begin]), torch.Size([size])) for begin, size in parts]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks)
    index = Metadata({"model.x": entry}, {"model.x": ("model", "x")}, {})
    if key != "model.x":
        one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks[:1])
        index.state_dict_metadata[key], index.planner_data = one, {key: ("model", "x")}
    index.storage_data[MetadataIndex("model.x", torch.Size([0]))] = _StorageInfo(name, 0, 100)
    return index


@pytest.mark.parametrize(
    "index",
    [
        index_of([(0, 2), (0, 2)]),
        index_of([(0, 4), (2, 4)]),
        index_of([(0, 3), (2, 1)]),
        index_of([]),
        index_of([(4, 4)]),
        index_of([(0, 4), (0, -4)]),
        index_of([(0, 4)] * 3, key="other"),
        index_of([(0, 1)] * 4),
    ],
    ids=["twice", "out", "hole", "none", "elsewhere", "negative", "by another name", "four times"],
)
def test_parts_of_a_tensor_make_up_the_whole_and_are_read_once(tmp_path: Path, index: Metadata) -> None:
    torch.save(torch.ones(4), tmp_path / "__0_0.distcp")
    (tmp_path / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="parts"):
        SavedShards(tmp_path, "model")
    sound = index_of([(0, 4)])
    sound.storage_data[MetadataIndex("model.x", torch.Size([0]))].length = os.path.getsize(tmp_path / "__0_0.distcp")
    (tmp_path / INDEX).write_bytes(pickle.dumps(sound))
    state = SavedShards(tmp_path, "model").read(lambda _, size, dtype: torch.empty(size, dtype=dtype))
    assert state["x"].tolist() == [1.0] * 4


@pytest.mark.parametrize("grid", [(16_384, 1), (1, 16_384), (64, 64)])
def test_parts_of_many_processes_are_accepted_soon(grid: tuple[int, int]) -> None:
    rows, columns = grid
    parts = [
        ChunkStorageMetadata(torch.Size([row * 3, column * 2]), torch.Size([3, 2]))
        for row in range(rows)
        for column in range(columns)
    ]
    nothing = [ChunkStorageMetadata(torch.Size([3 * rows, 0]), torch.Size([0, 2]))] * 2  # of processes without rows
    size = torch.Size([3 * rows, 2 * columns])
    begin = time.process_time()
    _check_parts([TensorStorageMetadata(TensorProperties(), size, [*parts, *nothing]) for _ in range(3)])
    assert time.process_time() - begin < 20


def test_a_file_counts_once_however_it_is_called(tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "__0_0.distcp")
    index = index_of([(0, 4)])
    size = os.path.getsize(tmp_path / "__0_0.distcp")
    for number in range(10):
        place = _StorageInfo("./" * number + "__0_0.distcp", 0, size)
        index.storage_data[MetadataIndex(f"model.{number}")] = place
    (tmp_path / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="expected files with the"):
        SavedShards(tmp_path, "model")


def test_a_name_in_bytes_is_no_name(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(index_of([(0, 4)], b"__0_0.distcp")))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="it is no text"):
        SavedShards(tmp_path, "model")


def test_indices_of_a_sparse_tensor_lead_nowhere_else(tmp_path: Path) -> None:
    torch.save(
        {"sparse": torch.sparse_coo_tensor([[100_000_000_000]], [1.0], (8,), check_invariants=False)}, tmp_path / "x"
    )
    with pytest.raises(CheckpointError, match="size is 8 but found index"):
        read_pickle(tmp_path / "x", "a state")


def test_shards_are_not_written_through_a_link_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "model").symlink_to("other")
    with pytest.raises(CheckpointError, match="found a link to one"):
        ShardedFolder("model", "__0_0.distcp", [], [], None).write(tmp_path)
