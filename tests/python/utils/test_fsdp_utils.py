"""Sharded checkpoints become one file, modules are left out of sharding, and weights are read by one rank."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils.fsdp_utils as original
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.utils import FullyShardedDataParallelPlugin, fsdp_utils, merge_fsdp_weights

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


def sharded(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("content", [WEIGHTS, {"model": WEIGHTS}])
@pytest.mark.parametrize("safe", [True, False])
def test_the_weights_are_those_of_the_shards(tmp_path: Path, content: dict[str, Any], safe: bool) -> None:
    source = sharded(tmp_path / "shards", content)
    merge_fsdp_weights(source, tmp_path / "out", safe_serialization=safe)
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == ("model.safetensors" if safe else "pytorch_model.bin")
    merged = load_file(path) if safe else torch.load(path, weights_only=True)
    assert merged.keys() == WEIGHTS.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in WEIGHTS.items())
    assert source.is_dir()


def test_the_shards_are_removed_when_asked(tmp_path: Path) -> None:
    source = sharded(tmp_path / "shards", WEIGHTS)
    merge_fsdp_weights(source, tmp_path, remove_checkpoint_dir=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_folder_is_refused_and_the_right_one_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"found no file \.metadata; pass the folder that torch"):
        merge_fsdp_weights(tmp_path, tmp_path)
    sharded(tmp_path / "pytorch_model_fsdp_0", WEIGHTS)
    with pytest.raises(InvalidArgument, match=r"pass .*pytorch_model_fsdp_0$"):
        merge_fsdp_weights(tmp_path, tmp_path)


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    source = sharded(tmp_path / "shards", WEIGHTS)
    for part in source.glob("*.distcp"):
        part.unlink()
    with pytest.raises(CheckpointError, match="a part may be missing"):
        merge_fsdp_weights(source, tmp_path / "out", remove_checkpoint_dir=True)
    assert list((tmp_path / "out").iterdir()) == []
    assert source.is_dir()


def test_shards_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "sharded", {"model": {"weight": torch.ones(3)}})
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        (source / stored.relative_path).rename(tmp_path / "elsewhere")
        stored.relative_path = "../elsewhere"
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata names '\.\./elsewhere': .* points outside that folder"):
        merge_fsdp_weights(source, tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []


def test_transformers_reads_weights_on_one_rank_while_that_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "")
    fsdp_utils.enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"].lower() == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].lower() == "true"
    fsdp_utils.disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"


@pytest.mark.parametrize("modules", ["0", "1", r"1\..*", ".*", "no", None, "list", "module"])
def test_parameters_of_modules_are_those_that_the_original_finds(modules: str | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    asked: Any = {"list": [model[1], model[1]], "module": model}.get(str(modules), modules)
    own, theirs = (module.get_parameters_from_modules(asked, model, "cpu") for module in (fsdp_utils, original))
    assert isinstance(own, set)
    assert own == theirs


def test_modules_that_are_left_out_are_moved_to_the_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    found = fsdp_utils.get_parameters_from_modules([model[0]], model, "meta")
    assert found == set(model[0].parameters())
    assert [layer.weight.device.type for layer in model] == ["meta", "cpu"]


@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]},
        {"auto_wrap_policy": "transformer_based_wrap"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 4},
        {"auto_wrap_policy": "no_wrap"},
    ],
)
def test_modules_that_are_sharded_on_their_own_are_the_originals(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), checkpoint_wrapper(torch.nn.LayerNorm(2)), torch.nn.Conv1d(1, 1, 1)
    )
    model._no_split_modules = ["LayerNorm"]
    ours = fsdp_utils.fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2, **options), model)
    theirs = original.fsdp2_prepare_auto_wrap_policy(
        accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **options), model
    )
    if theirs is None:
        assert ours is None
        return
    assert ours is not None
    assert [ours(part) for part in model.modules()] == [bool(theirs(part)) for part in model.modules()]


def test_a_class_that_no_layer_has_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    with pytest.raises(InvalidArgument, match="'Block', but Linear has no layer of that class"):
        fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, torch.nn.Linear(1, 1))


def test_names_lose_what_wrappers_put_into_them() -> None:
    names = [
        "a._checkpoint_wrapped_module.b",
        "_orig_mod.c",
        "x._orig_mod._checkpoint_wrapped_module.y",
        "_orig.d",
        "e",
    ]
    own, theirs = (module.fsdp2_canonicalize_names(dict.fromkeys(names, 1)) for module in (fsdp_utils, original))
    assert own == theirs
    assert list(own) == ["a.b", "c", "x.y", "_orig.d", "e"]
