"""Whatever a checkpoint or an offload folder contains, no file outside of it is read, and nothing waits for a pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_cpp import Accelerator, load_checkpoint_in_model
from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.safetensors_file import read_safetensors
from accelerate_cpp.checkpoint.sharded_folder import INDEX, SavedShards
from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, offload_state_dict
from accelerate_cpp.utils import merge_fsdp_weights
from make_seeds import shards_index

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


def test_links_inside_a_checkpoint_and_to_the_whole_of_it_are_followed(saved: tuple[Accelerator, Path]) -> None:
    accelerator, folder = saved
    (folder / "elsewhere").mkdir()
    (folder / "optimizer.bin").rename(folder / "elsewhere" / "optimizer.bin")
    (folder / "optimizer.bin").symlink_to("elsewhere/optimizer.bin")
    (folder.parent / "newest").symlink_to(folder)
    accelerator.load_state(folder.parent / "newest")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "a.safetensors.index.json"])
def test_weights_are_read_from_no_file_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, folder / "model.safetensors")
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save({"weight": torch.ones(1, 2)}, folder / name)
    elif name.endswith(".json"):
        (folder / "model.safetensors").rename(folder / "part")
        (folder / name).write_text(json.dumps({"weight_map": {"weight": "part", "bias": "part"}}))
    moved_out(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} {OUTSIDE}is a link|{OUTSIDE}"):
        load_checkpoint_in_model(nn.Linear(2, 1), folder)


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


def test_an_index_of_a_few_bytes_takes_little_memory(tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "__0_0.distcp")

    def refusal(content: bytes) -> str:
        (tmp_path / INDEX).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            SavedShards(tmp_path, "model").read(lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
        return str(caught.value)

    assert "place 2147483647 of a table" in refusal(b"\x80\x04]r\xff\xff\xff\x7f.")
    assert "expected files with the" in refusal(shards_index(size=(1 << 40, 1 << 20)))
    assert "of a list, in an index of 1 values" in refusal(shards_index(steps=("model", "x", 1 << 40)))


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


def test_a_safetensors_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is missing|found a folder, a pipe or a device"):
        read_safetensors(tmp_path / "model.safetensors")
