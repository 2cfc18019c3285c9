"""Models in several files, compared with the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME
from accelerate_cpp.checkpoint.shards import save_in_shards, split
from accelerate_cpp.errors import SystemFailure


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), limit=st.integers(1, 100))
def test_tensors_are_dealt_out_as_the_original_does(sizes: list[int], limit: int) -> None:
    state = {f"t{index}": torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    expected = split_torch_state_dict_into_shards(state, max_shard_size=limit).filename_to_tensors.values()
    assert [list(shard) for shard in split(state, limit) if shard] == [names for names in expected if names]


STATE = {name: torch.full((100,), float(index)) for index, name in enumerate("cab")}


def test_a_large_model_has_shards_and_an_index(tmp_path: Path) -> None:
    save_in_shards(STATE, tmp_path, max_shard_size=800)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_file(tmp_path / names[0]).keys() == {"c", "a"}
    text = (tmp_path / names[2]).read_text()
    where = {"a": names[0], "b": names[1], "c": names[0]}
    assert json.loads(text) == {"metadata": {"total_size": 1200}, "weight_map": where}
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_shards_of_an_earlier_save_go_and_other_files_stay(tmp_path: Path) -> None:
    save_in_shards(STATE, tmp_path, max_shard_size=400)
    (tmp_path / "config.json").write_text("{}")
    save_in_shards(STATE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_in_shards(STATE, tmp_path, max_shard_size=400)
    assert not (tmp_path / "model.safetensors").exists(), "who loads the folder would take it before the shards"
    assert (tmp_path / "model.safetensors.index.json").exists()


def test_the_weights_of_a_checkpoint_stay_where_a_model_is_saved_beside_them(tmp_path: Path) -> None:
    for name in ("model.safetensors", MANIFEST_NAME):
        (tmp_path / name).touch()
    save_in_shards(STATE, tmp_path, max_shard_size=400)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("second", "index_stays"), [(800, False), (400, True)])
def test_a_save_that_is_killed_leaves_no_index_of_two_models(
    tmp_path: Path, dies_at_the_second: Any, second: int, index_stays: bool
) -> None:
    """Shards of another number have other names, so that the earlier model is whole until its index is replaced."""
    save_in_shards(STATE, tmp_path, max_shard_size=800)
    before = (tmp_path / "model.safetensors.index.json").read_text()
    dies_at_the_second("replace")
    with pytest.raises(KeyboardInterrupt):
        save_in_shards({name: tensor + 1 for name, tensor in STATE.items()}, tmp_path, max_shard_size=second)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == index_stays
    if index_stays:
        assert index.read_text() == before
        names = set(json.loads(before)["weight_map"].values())
        assert {key: value[0].item() for name in names for key, value in load_file(tmp_path / name).items()} == {
            key: value[0].item() for key, value in STATE.items()
        }


def test_pickles_are_named_as_the_original_names_them(tmp_path: Path) -> None:
    save_in_shards(STATE, tmp_path / "one", safe_serialization=False)
    assert torch.load(tmp_path / "one" / "pytorch_model.bin").keys() == STATE.keys()
    save_in_shards(STATE, tmp_path / "more", 800, safe_serialization=False)
    assert sorted(path.name for path in (tmp_path / "more").iterdir()) == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]


def test_a_model_without_tensors_is_one_file(tmp_path: Path) -> None:
    save_in_shards({}, tmp_path)
    assert load_file(tmp_path / "model.safetensors") == {}


def test_a_failure_leaves_the_earlier_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_shards(STATE, tmp_path, max_shard_size=800)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_arguments: object) -> None:
        raise SystemFailure(28, "no space")

    monkeypatch.setattr("accelerate_cpp.checkpoint.shards.write_bytes", fail)
    with pytest.raises(OSError, match="no space"):
        save_in_shards({name: tensor + 1 for name, tensor in STATE.items()}, tmp_path, max_shard_size=400)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
