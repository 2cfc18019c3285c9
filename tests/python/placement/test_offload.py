"""Weights in folders, which the original reads and writes, too."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import accelerate.utils as original
import pytest
import torch
from safetensors.torch import save_file

from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure
from accelerate_cpp.placement.offload import (
    FolderWriter,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)

STATE = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.transposed": torch.arange(6.0).reshape(2, 3).t(),
    "half": torch.arange(3, dtype=torch.float16),
    "brain": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "brain scalar": torch.tensor(7, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
}
MORE = {"eight": torch.ones(3).to(torch.float8_e4m3fn), "empty": torch.empty(0, 3), "conj": STATE["complex"].conj()}


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    assert (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)
    assert first.reshape(-1).tolist() == second.reshape(-1).tolist()


def test_the_original_reads_what_is_written(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new" / "folder", STATE)
    loader = original.OffloadedWeightsLoader(save_folder=tmp_path / "new" / "folder")
    assert list(loader) == list(STATE)
    for name, tensor in STATE.items():
        same(loader[name], tensor)


def test_what_the_original_writes_is_read(tmp_path: Path) -> None:
    original.offload_state_dict(tmp_path / "theirs", STATE)
    offload_state_dict(tmp_path / "ours", STATE)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    for name, tensor in STATE.items():
        same(loader[name], tensor)
    files = [path.name for path in sorted((tmp_path / "theirs").iterdir())]
    assert files == [path.name for path in sorted((tmp_path / "ours").iterdir())]
    for name in files:
        ours, theirs = ((tmp_path / folder / name).read_bytes() for folder in ("ours", "theirs"))
        assert json.loads(ours) == json.loads(theirs) if name == "index.json" else ours == theirs


def test_dtypes_that_numpy_lacks_and_tensors_without_elements_are_kept(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, MORE)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    for name, tensor in MORE.items():
        same(loader[name], tensor)


def test_a_weight_is_noted_in_the_index_that_is_given(tmp_path: Path) -> None:
    index: dict[str, Any] = {}
    assert offload_weight(STATE["brain"], "w", tmp_path, index) is index
    assert index == {"w": {"dtype": "bfloat16", "shape": [3]}}
    assert offload_weight(STATE["half"], "v", tmp_path) is None
    same(load_offloaded_weight(tmp_path / "w.dat", index["w"]), STATE["brain"])


def test_changing_what_was_read_does_not_change_the_file(tmp_path: Path) -> None:
    offload_weight(torch.zeros(4), "w", tmp_path)
    info = {"dtype": "float32", "shape": [4]}
    load_offloaded_weight(tmp_path / "w.dat", info).fill_(1)
    assert load_offloaded_weight(tmp_path / "w.dat", info).tolist() == [0, 0, 0, 0]


def test_whoever_has_mapped_a_file_keeps_it_when_another_takes_its_place(tmp_path: Path) -> None:
    info = {"dtype": "float32", "shape": [4]}
    offload_weight(torch.zeros(4), "w", tmp_path)
    mapped = load_offloaded_weight(tmp_path / "w.dat", info)
    offload_weight(torch.ones(4), "w", tmp_path)
    assert mapped.tolist() == [0, 0, 0, 0]
    assert load_offloaded_weight(tmp_path / "w.dat", info).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing; expected a tensor of torch.float32"),
        (lambda path: path.write_bytes(bytes(12)), "expected 16 bytes .* found 12; the file is cut short"),
        (lambda path: path.write_bytes(bytes(32)), "expected 16 bytes .* found 32"),
    ],
)
def test_a_file_that_is_missing_or_of_another_length_is_named(tmp_path: Path, change: Any, message: str) -> None:
    offload_weight(torch.zeros(4), "w", tmp_path)
    change(tmp_path / "w.dat")
    with pytest.raises(CheckpointError, match=rf"w\.dat.*{message}"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [4]})


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("../w", torch.zeros(1), r"'\.\./w' cannot be the name"),
        ("", torch.zeros(1), "'' cannot be the name"),
        ("w", torch.empty(1, device="meta"), "'w': expected a dense tensor with values to offload, found one on meta"),
        ("w", torch.zeros(2).to_sparse(), "'w': expected a dense tensor"),
        ("w", 5, "'w': expected .*, found one a int"),
    ],
)
def test_what_can_be_no_file_is_refused(tmp_path: Path, name: str, weight: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        offload_weight(weight, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_index_is_added_to_the_one_of_the_folder(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save_offload_index({"a": {"dtype": "int8", "shape": []}, "b": {"dtype": "int8", "shape": []}}, tmp_path)
    save_offload_index({"b": {"dtype": "int8", "shape": [2]}}, tmp_path)
    assert read_offload_index(tmp_path) == {
        "a": {"dtype": "int8", "shape": []},
        "b": {"dtype": "int8", "shape": [2]},
    }


@pytest.mark.parametrize("content", [None, "{nonsense", "[1]"])
def test_a_folder_without_an_index_that_can_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: expected the index of offloaded weights"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_entries_of_modules_are_extracted_by_whole_names() -> None:
    state = {"a.w": 1, "ab.w": 2, "a": 3, "b.c.d": 4, "b.cd": 5}
    for names in (["a"], ["b.c"], ["a", "b"], []):
        expected = original.extract_submodules_state_dict(state, names)
        assert extract_submodules_state_dict(state, names) == expected
    assert extract_submodules_state_dict(state, [""]) == state


def test_entries_with_a_prefix_are_a_mapping_of_their_own() -> None:
    part = PrefixedDataset({"a.x": 1, "b": 2, "a.y": 3}, "a.")
    assert dict(part) == {"x": 1, "y": 3}
    assert (len(part), "x" in part, "b" in part, "a.x" in part) == (2, True, False, False)


def test_tensors_of_a_state_dict_come_before_those_of_the_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.ones(1)})
    loader = OffloadedWeightsLoader(state_dict={"b": torch.full((1,), 2.0), "c": torch.ones(1)}, save_folder=tmp_path)
    assert {name: loader[name].item() for name in loader} == {"b": 2, "c": 1, "a": 0}
    assert (len(loader), "a" in loader, "z" in loader) == (3, True, False)
    with pytest.raises(KeyError):
        loader["z"]


def test_a_file_is_mapped_once_and_anew_by_a_copy(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(4)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert loader["a"] is loader["a"]
    assert copy.deepcopy(loader)["a"].data_ptr() != loader["a"].data_ptr()


def test_an_index_may_name_tensors_of_safetensors_files(tmp_path: Path) -> None:
    path = str(tmp_path / "f.safetensors")
    save_file({"x.y": torch.ones(2)}, path)
    index = {
        "a": {"safetensors_file": path, "weight_name": "x.y", "dtype": "float16"},
        "x.y": {"safetensors_file": path},
        "b": {"safetensors_file": path},
        "c": {"dtype": "float32", "shape": [1]},
    }
    loader = OffloadedWeightsLoader(index=index)
    assert (loader["a"].dtype, loader["a"].tolist()) == (torch.float16, [1, 1])
    assert loader["x.y"].dtype is torch.float32
    assert OffloadedWeightsLoader(index=index, device="meta")["a"].device.type == "meta"
    assert copy.deepcopy(loader)["a"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"f\.safetensors: the tensor 'b' cannot be read"):
        loader["b"]
    with pytest.raises(InvalidArgument, match="'c' is in no safetensors file, and no save_folder is given"):
        loader["c"]


def test_a_loader_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs tensors"):
        OffloadedWeightsLoader()


def test_after_an_error_a_folder_is_as_it_was_but_for_what_was_replaced(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(InvalidArgument, match="'meta'"):
        offload_state_dict(tmp_path, {"b": torch.ones(2), "c": torch.ones(2), "meta": torch.ones(1, device="meta")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dat", "index.json"]
    assert read_offload_index(tmp_path) == {"a": {"dtype": "float32", "shape": [1]}}


def test_a_writer_saves_the_index_at_its_end(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "f") as writer:
        writer.write("a", torch.zeros(2))
        assert not (tmp_path / "f" / "index.json").exists()
    assert read_offload_index(tmp_path / "f") == writer.index == {"a": {"dtype": "float32", "shape": [2]}}


def test_an_index_that_cannot_be_saved_takes_the_files_with_it(tmp_path: Path) -> None:
    (tmp_path / "index.json").mkdir()
    with pytest.raises(SystemFailure, match=r"while writing .*index\.json"), FolderWriter(tmp_path) as writer:
        writer.write("a", torch.zeros(2))
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_what_the_system_refuses_is_an_error_with_the_path(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SystemFailure, match=r"too large while writing 4194304 bytes to .*big\.dat; make room"):
            offload_state_dict(tmp_path, {"small": torch.zeros(1), "big": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB, where the system lets tests mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(small_disk: Path) -> None:
    with pytest.raises(
        SystemFailure, match=r"No space left on device while writing 65536 bytes to .*big\.dat"
    ) as raised:
        offload_state_dict(small_disk, {"small": torch.zeros(1024), "big": torch.zeros(16384)})
    assert raised.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
    offload_state_dict(small_disk, {"small": torch.zeros(1024)})
    assert len(OffloadedWeightsLoader(save_folder=small_disk)) == 1


def test_a_file_with_the_same_bytes_stays(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"same": torch.ones(3), "other": torch.ones(3), "empty": torch.empty(0)})
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    offload_state_dict(tmp_path, {"same": torch.ones(3), "other": torch.zeros(3), "empty": torch.empty(0)})
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert after["same.dat"] == before["same.dat"]
    assert after["empty.dat"] == before["empty.dat"]
    assert OffloadedWeightsLoader(save_folder=tmp_path)["other"].tolist() == [0, 0, 0]


def test_what_an_earlier_call_wrote_is_not_taken_back(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3)})
    with pytest.raises(InvalidArgument, match="'b'"):
        offload_state_dict(tmp_path, {"a": torch.ones(3), "b": torch.empty(2, device="meta")})
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1, 1]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nfrom accelerate_cpp.utils import offload_state_dict\nprint('begins', flush=True)\n"
        "offload_state_dict(sys.argv[1], {'theirs': torch.ones(2)})"
    )
    with ExitStack() as writing:
        writer = writing.enter_context(FolderWriter(tmp_path))
        command = [sys.executable, "-c", program, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "begins\n"
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.5)
            writer.write("ours", torch.ones(2))
            writing.close()
            assert other.wait(120) == 0
    assert set(read_offload_index(tmp_path)) == {"ours", "theirs"}


def test_views_are_of_files_alone(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3)})
    loader = OffloadedWeightsLoader({"b": torch.ones(2)}, tmp_path)
    assert loader.view("b") is None
    view = loader.view("a")
    assert view is not None
    assert view.data_ptr() == loader["a"].data_ptr()


def test_converted_tensors_of_safetensors_files_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    loader = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(path), "dtype": "float16"}})
    assert loader["a"].dtype == torch.float16
    first, second = loader["a"], loader["a"]
    assert first.data_ptr() != second.data_ptr()
    view = loader.view("a")
    assert view is not None
    assert view.dtype == torch.float32
