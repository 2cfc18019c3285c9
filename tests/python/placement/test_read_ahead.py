"""Weights that are fetched ahead of the modules that need them: from files, and to the device double of the core."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_cpp.big_modeling import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, PrefixedDataset
from accelerate_cpp.placement.offloaded_modules import offload_hook
from accelerate_cpp.placement.read_ahead import DeviceCopier, FileReader, Unit, unit_of

LAYER_BYTES = 64 * 64 * 4


def layers(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


def reader_of(model: nn.Module) -> FileReader:
    hook = offload_hook(model[0])
    assert isinstance(hook, AlignDevicesHook)
    assert isinstance(hook._unit, Unit)
    assert isinstance(hook._unit.engine, FileReader)
    return hook._unit.engine


@pytest.fixture
def row() -> torch.Tensor:
    return torch.arange(64.0)[None] / 64


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> int:
    """Two layers and a half."""
    size = LAYER_BYTES * 5 // 2
    monkeypatch.setenv("ACCELERATE_CPP_OFFLOAD_WINDOW", str(size))
    return size


def test_a_pass_gives_what_it_gives_without(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    model = layers()
    expected = model(row)
    disk_offload(model, tmp_path, execution_device="cpu")
    for _ in range(3):
        assert torch.equal(model(row), expected)


def test_files_are_read_as_far_ahead_as_the_window(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    model = disk_offload(layers(), tmp_path, execution_device="cpu")
    reader = reader_of(model)
    assert reader.bytes_ahead == 0
    ahead = []
    for layer in model:
        layer(row)
        reader.await_idle()
        ahead.append(reader.bytes_ahead)
    assert ahead[0] == window, "of the layers after the first"
    assert max(ahead) <= window
    assert min(ahead) > 0, "after the last layer the next pass is read"


def test_a_small_model_is_read_as_a_whole(tmp_path: Path, row: torch.Tensor) -> None:
    model = disk_offload(layers(), tmp_path, execution_device="cpu")
    model[0](row)
    reader = reader_of(model)
    reader.await_idle()
    assert reader.bytes_ahead == 5 * LAYER_BYTES, "all others: 512 MiB would be"


def test_a_window_of_0_reads_nothing_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_OFFLOAD_WINDOW", "0")
    model = disk_offload(layers(), tmp_path, execution_device="cpu")
    hook = offload_hook(model[0])
    assert hook is not None
    assert hook._unit is None


def test_a_window_that_is_no_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_OFFLOAD_WINDOW", "much")
    with pytest.raises(InvalidArgument, match="ACCELERATE_CPP_OFFLOAD_WINDOW='much'"):
        disk_offload(layers(), tmp_path, execution_device="cpu")


def test_safetensors_files_are_read_ahead(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    model = layers()
    expected = model(row)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    index = {name: {"safetensors_file": str(path), "dtype": "float32"} for name in model.state_dict()}
    weights = OffloadedWeightsLoader(index=index)
    dtypes = {"weight": torch.float32}
    units = [unit_of(PrefixedDataset(weights, f"{n}."), dtypes, torch.device("cpu")) for n in range(6)]
    assert units[0] is not None
    assert not units[0].arrive()
    units[0].engine.await_idle()
    assert units[0].engine.bytes_ahead == window
    for n, layer in enumerate(model):
        assert torch.equal(weights[f"{n}.weight"], layer.weight)
    assert torch.equal(model(row), expected)


def test_weights_in_memory_are_not_read(row: torch.Tensor) -> None:
    model = cpu_offload(layers(), execution_device="cpu")
    hook = offload_hook(model[0])
    assert hook is not None
    assert hook._unit is None


def test_half_in_memory_and_half_on_the_disk(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    path = tmp_path / "model.safetensors"
    trained = layers()
    save_file(trained.state_dict(), path)
    with init_empty_weights():
        model = layers()
    device_map = {str(n): "cpu" if n < 3 else "disk" for n in range(6)}
    load_checkpoint_and_dispatch(model, path, device_map=device_map, offload_folder=tmp_path / "off")
    # Not to the last bit: how torch multiplies depends on how weights are aligned, and those in files are as they come.
    torch.testing.assert_close(model(row), trained(row))
    hook = offload_hook(model[3])
    assert hook is not None
    assert hook._unit is not None


def test_copies_of_a_model_read_by_themselves(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    model = disk_offload(layers(), tmp_path, execution_device="cpu")
    expected = model(row)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(row), expected)
        assert reader_of(other) is not reader_of(model)
        reader_of(other).await_idle()
        assert reader_of(other).bytes_ahead > 0


def test_a_forked_child_computes_too(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = disk_offload(layers(), tmp_path, execution_device="cpu")
        expected = model(row)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(model(row), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


def test_models_go_with_their_readers(tmp_path: Path, row: torch.Tensor, window: int) -> None:
    model = disk_offload(layers(), tmp_path, execution_device="cpu")
    model(row)
    remove_hook_from_submodules(model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.parametrize("way", ["cpu_offload(layers(), 'standin:0')", "disk_offload(layers(), 'off', 'standin:0')"])
def test_the_next_layers_are_on_the_device_when_they_are_needed(way: str, on_the_double: Callable[..., None]) -> None:
    on_the_double(
        f"""
        model = {way}
        for _ in range(3):
            copies = double.pool_copies()
            assert torch.equal(calm_pass(model), expected)
            assert double.pool_copies() - copies == 5, "all but the first"
        assert torch.equal(model(row), expected)
        """
    )


def test_the_device_has_no_more_than_the_window_and_the_layer_that_computes(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        model = cpu_offload(layers(), "standin:0")
        double.forget_peak()
        calm_pass(model)
        calm_pass(model)
        rows = 4 * row.nbytes
        assert 2 * LAYER <= double.peak_bytes() <= 3 * LAYER + rows, (double.peak_bytes(), 3 * LAYER)
        assert double.bytes_in_use() == 0, "between passes"
        """
    )


def test_layers_are_copied_while_others_compute(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        model = cpu_offload(layers(), "standin:0")
        double.hold_pool_copies(True)
        value = model[0](row.to("standin:0"))  # returns although the copy of the next layer cannot end
        while engine_of(model).bytes_ahead == 0:
            pass
        double.hold_pool_copies(False)
        for layer in list(model)[1:]:
            value = layer(value)
        assert torch.equal(value.cpu(), expected)
        """
    )


def test_weights_that_change_are_copied_anew(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        reference = layers()
        model = cpu_offload(layers(), "standin:0")
        weights = offload_hook(model[0]).weights_map.dataset.state_dict
        calm_pass(model)
        value = model[0](row.to("standin:0"))
        engine_of(model).await_idle()
        weights["1.weight"].mul_(2)
        weights["2.weight"] = weights["2.weight"] * 3
        reference[1].weight.mul_(2)
        reference[2].weight.mul_(3)
        for layer in list(model)[1:]:
            value = layer(value)
        assert torch.equal(value.cpu(), reference(row))
        """
    )


def test_a_device_without_room_is_told_of_where_the_layer_is_needed(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        model = cpu_offload(layers(), "standin:0")
        value = row.to("standin:0")
        double.set_room(double.bytes_in_use() + LAYER - 1)
        try:
            model(row)
        except torch.OutOfMemoryError as error:
            assert "no room" in str(error)
        else:
            raise AssertionError("there was no room")
        double.set_room(2**40)
        assert torch.equal(model(row), expected)
        """
    )


def test_nothing_is_copied_ahead_unless_asked_for(on_the_double: Callable[..., None]) -> None:
    on_the_double(
        """
        model = cpu_offload(layers(), "standin:0")
        assert offload_hook(model[0])._unit is None
        assert torch.equal(model(row), expected)
        assert double.pool_copies() == 0
        """,
        ACCELERATE_CPP_OFFLOAD_WINDOW="",
    )


def test_a_model_on_three_places_writes_the_same_words(on_the_double: Callable[..., None]) -> None:
    """Twice as large as what the device is given: the rest is in memory and on the disk."""
    pytest.importorskip("transformers")
    on_the_double(
        """
        from transformers import GPT2Config, GPT2LMHeadModel
        from accelerate_cpp import infer_auto_device_map
        from accelerate_cpp.utils import compute_module_sizes
        config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=6, n_head=4, bos_token_id=1,
                            eos_token_id=1, pad_token_id=0)
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        tokens = torch.tensor([[5, 9, 33]])
        words = model.generate(tokens, max_new_tokens=24, do_sample=False)
        total = compute_module_sizes(model)[""]
        device_map = {"transformer.wte": 0, "transformer.wpe": 0, "lm_head": 0, "transformer.ln_f": 0}
        for n in range(6):
            device_map[f"transformer.h.{n}"] = 0 if n < 2 else "cpu" if n < 4 else "disk"
        on_device = {name: "standin:0" if place == 0 else place for name, place in device_map.items()}
        dispatch_model(model, on_device, offload_dir="off")
        assert double.bytes_in_use() < total / 2, "the device holds less than half of the model"
        assert torch.equal(model.generate(tokens.to("standin:0"), max_new_tokens=24, do_sample=False).cpu(), words)
        assert double.pool_copies() > 0
        """,
        ACCELERATE_CPP_OFFLOAD_WINDOW="1MB",
    )


def test_an_engine_needs_weights_that_can_be_asked_for(tmp_path: Path) -> None:
    assert unit_of({"weight": torch.ones(2)}, {"weight": torch.float32}, torch.device("cpu")) is None
    assert unit_of(OffloadedWeightsLoader({"weight": torch.ones(2)}), {}, torch.device("cpu")) is None
    loader = OffloadedWeightsLoader({"weight": torch.ones(2)})
    assert DeviceCopier(loader, torch.device("cpu"), 8).bytes_ahead == 0
