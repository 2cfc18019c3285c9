"""Which file holds what, and what is said of those that do not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint.files import record_of
from accelerate_cpp.checkpoint.layout import (
    check_custom,
    check_states,
    custom_file,
    fit_names,
    numbered_name,
    own_files,
    random_states_file,
    read_custom,
    read_model,
    read_models,
    read_states,
    restore_parts,
    shared_files,
    warn_of_missing,
)
from accelerate_cpp.checkpoint.manifest import Manifest
from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.parallel.bundle import Bundle


def test_the_first_object_has_no_number() -> None:
    assert [numbered_name("optimizer.bin", index) for index in (0, 1, 12)] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_12.bin",
    ]


class Scale:
    """Of a loss scaler, the part that checkpoints need."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class StatefulLoader(Scale):
    use_stateful_dataloader = True


def load_parts(folder: Path, own: Bundle, rank: int) -> dict[str, Any]:
    states = read_states(folder, own, rank)
    warn_of_missing(folder, check_states(folder, own, states))
    return restore_parts(own, states, read_models(folder, own.models))


def parts() -> Bundle:
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizer = torch.optim.Adam(models[0].parameters())
    return Bundle(
        models=models,
        optimizers=[optimizer],
        schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 1)],
        dataloaders=[object(), StatefulLoader(5.0)],
        scaler=Scale(8.0),
    )


@pytest.mark.parametrize("safe", [True, False])
def test_all_parts_are_restored(tmp_path: Path, safe: bool) -> None:
    saved, fresh = parts(), parts()
    saved.models[0](torch.ones(1, 2)).sum().backward()
    saved.optimizers[0].step()
    saved.schedulers[0].step()
    saved.scaler.scale, saved.dataloaders[1].scale = 16.0, 7.0
    files = shared_files(saved, [model.state_dict() for model in saved.models], safe)
    for file in [*files, random_states_file(0, step=3)]:
        file.write(tmp_path)
    models = {"model.safetensors", "model_1.safetensors"} if safe else {"pytorch_model.bin", "pytorch_model_1.bin"}
    others = {"optimizer.bin", "scheduler.bin", "dl_state_dict_1.bin", "scaler.pt", "random_states_0.pkl"}
    assert {path.name for path in tmp_path.iterdir()} == models | others
    assert load_parts(tmp_path, fresh, rank=0) == {"step": 3}
    for own, other in zip(saved.models, fresh.models, strict=True):
        assert torch.equal(own.weight, other.weight)
    moments = fresh.optimizers[0].state_dict()["state"]
    assert torch.equal(moments[0]["exp_avg"], saved.optimizers[0].state_dict()["state"][0]["exp_avg"])
    assert fresh.schedulers[0].last_epoch == 1
    assert (fresh.scaler.scale, fresh.dataloaders[1].scale) == (16.0, 7.0)


def test_each_rank_has_the_state_of_its_own_loader_back_if_it_is_another(tmp_path: Path) -> None:
    class OwnState(StatefulLoader):
        has_own_state = True

    for rank in range(3):
        saved = Bundle(dataloaders=[StatefulLoader(5.0), OwnState(7.0 + rank)])
        for file in [*(shared_files(saved, [], True) if rank == 0 else []), *own_files(saved, rank)]:
            file.write(tmp_path)
    loaders = {"dl_state_dict.bin", "dl_state_dict_1.bin"}
    assert {path.name for path in tmp_path.iterdir()} == loaders | {f"dl_state_dict_rank{n}_1.bin" for n in (1, 2)}
    for rank, expected in enumerate((7.0, 8.0, 9.0, 7.0)):
        fresh = Bundle(dataloaders=[StatefulLoader(0.0), OwnState(0.0)])
        load_parts(tmp_path, fresh, rank)
        assert [loader.scale for loader in fresh.dataloaders] == [5.0, expected]


def test_a_missing_optimizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing; it should contain the state of optimizer 0"):
        load_parts(tmp_path, Bundle(optimizers=parts().optimizers), rank=0)


def test_a_checkpoint_without_a_scale_leaves_it_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaler = Scale(4.0)
    random_states_file(0, 0).write(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_parts(tmp_path, Bundle(scaler=scaler), rank=0)
    assert scaler.scale == 4.0
    assert "loss scaler" in caplog.text


def test_a_new_rank_keeps_its_random_states_and_takes_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_states_file(0, step=5).write(tmp_path)
    before = torch.get_rng_state()
    torch.rand(1)
    after = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        assert load_parts(tmp_path, Bundle(), rank=1) == {"step": 5}
    assert "random_states_1.pkl is missing" in caplog.text
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_are_written_once_and_found_again(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    for file in [*shared_files(Bundle(), [model.state_dict()], True), random_states_file(0, 0)]:
        file.write(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 8 + 200 + 2 * 16
    load_parts(tmp_path, Bundle(models=[fresh]), rank=0)
    assert torch.equal(model.first.weight, fresh.second.weight)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_with_and_without_the_prefix_of_a_wrapper_fit(prefix: str) -> None:
    model = torch.nn.Linear(1, 1)
    prefixed = {prefix + name: value for name, value in model.state_dict().items()}
    assert fit_names(prefixed, model).keys() == model.state_dict().keys()
    outer = torch.nn.ModuleDict({"module": model})
    assert fit_names(model.state_dict(), outer).keys() == outer.state_dict().keys()


def test_names_of_compiled_parts_fit_those_of_the_plain_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    compiled = {name.replace("0.", "0._orig_mod."): value for name, value in model.state_dict().items()}
    assert fit_names(compiled, model).keys() == model.state_dict().keys()


def test_random_states_of_another_kind_are_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "random_states_0.pkl")
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=r"random_states_0\.pkl: expected the random states .* found list"):
            read_states(tmp_path, Bundle(), rank)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "a dict, found list"),
        (3, "a dict, found int"),
        ({0: torch.zeros(1)}, "a dict with names, found the key 0"),
        ({"weight": 3, "bias": torch.zeros(1)}, r"these are not tensors: weight \(a int\)"),
        ({"state": {}, "param_groups": []}, "it lacks weight, bias"),
    ],
)
def test_weights_of_another_kind_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin.*{words}"):
        read_models(tmp_path, [torch.nn.Linear(1, 1)])


def test_names_that_do_not_fit_stay_for_torch_to_complain_about() -> None:
    assert fit_names({"other": torch.zeros(1)}, torch.nn.Linear(1, 1)).keys() == {"other"}


def test_custom_objects_are_counted_before_anything_is_loaded(tmp_path: Path) -> None:
    for index in range(2):
        custom_file(index, {"scale": float(index)}).write(tmp_path)
    objects = [Scale(7.0), Scale(7.0)]
    assert read_custom(tmp_path, objects) == [{"scale": 0.0}, {"scale": 1.0}]
    assert [one.scale for one in objects] == [7.0, 7.0]
    with pytest.raises(RuntimeError, match="has 2 custom checkpoints, but 1 objects are registered"):
        check_custom(tmp_path, objects[:1])


def test_the_state_that_the_manifest_names_is_the_one_that_is_read(tmp_path: Path) -> None:
    """What it does not name is of an earlier checkpoint in this folder, in another layout."""
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    assert read_model(tmp_path, 0)["weight"].sum() == 0
    record = record_of(tmp_path / "pytorch_model.bin")
    Manifest(1, 1, {"pytorch_model.bin": record}, []).write(tmp_path)
    assert read_model(tmp_path, 0)["weight"].sum() == 4
