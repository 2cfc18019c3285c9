"""Quantization of models by bitsandbytes, on the CPU."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_cpp import init_empty_weights
from accelerate_cpp.config import libraries
from accelerate_cpp.errors import CheckpointError, InvalidArgument, MissingLibrary
from accelerate_cpp.quantization import bitsandbytes as bnb
from accelerate_cpp.quantization.bitsandbytes import BnbQuantizationConfig, load_and_quantize_model
from accelerate_cpp.utils import set_module_tensor_to_device

BITS: dict[str, dict[str, Any]] = {
    "8": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
}
CLASSES = {"8": "Linear8bitLt", "4": "Linear4bit"}
QUANTIZED = ["blocks.0", "blocks.1", "blocks.2"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=index > 0) for index in range(3)])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("angles", torch.ones(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden * self.scale))


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("bitsandbytes")


@pytest.fixture(params=BITS)
def bits(request: pytest.FixtureRequest, library: Any) -> str:
    return request.param


def config(bits: str, **others: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(**{**BITS[bits], **others})


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def saved(folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    save_file(state or model().state_dict(), folder / "model.safetensors")
    return folder


def replaced(quantized: nn.Module, bits: str) -> list[str]:
    return [name for name, module in quantized.named_modules() if type(module).__name__ == CLASSES[bits]]


def outputs(*models: nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        return [one(ids).float() for one in models]


def test_layers_of_4_bits_are_found_if_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear4bit(nn.Linear):
        pass

    quantized, plain = nn.Sequential(Linear4bit(1, 1)), nn.Sequential(nn.Linear(1, 1))
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    assert not bnb.has_4bit_bnb_layers(quantized)
    stand_in = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit))
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)  # type: ignore[arg-type]
    assert bnb.has_4bit_bnb_layers(quantized)
    assert not bnb.has_4bit_bnb_layers(plain)


@pytest.mark.parametrize("installed", [None, "0.37.1"])
def test_without_the_library_one_sentence_says_how_to_install_it(
    bits: str, installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_installed_version", lambda _: installed)
    untouched = model()
    with pytest.raises(
        MissingLibrary, match=rf"^load_and_quantize_model: {bits}-bit weights.*pip install bitsandbytes"
    ):
        load_and_quantize_model(untouched, config(bits))
    assert replaced(untouched, bits) == []


def test_a_model_with_values_is_quantized_but_for_its_head(bits: str) -> None:
    whole = model()
    parameters = {name: value for name, value in whole.named_parameters() if not name.startswith("blocks")}
    quantized = model()
    assert load_and_quantize_model(quantized, config(bits)) is quantized
    assert replaced(quantized, bits) == QUANTIZED
    assert (quantized.is_loaded_in_8bit, quantized.is_loaded_in_4bit) == (bits == "8", bits == "4")
    assert bnb.has_4bit_bnb_layers(quantized) == (bits == "4")
    assert all(torch.equal(value, quantized.get_parameter(name)) for name, value in parameters.items())
    expected, found = outputs(whole, quantized)
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < {"8": 0.05, "4": 0.5}[bits]
    assert quantized.blocks[0].weight.nbytes * {"8": 4, "4": 8}[bits] == whole.blocks[0].weight.nbytes


def test_what_is_not_quantized_gets_the_dtype_of_the_configuration(bits: str, tmp_path: Path) -> None:
    others = {"torch_dtype": "bf16", "keep_in_fp32_modules": ["norm"], "skip_modules": ["1", "head"]}
    for quantized in (
        load_and_quantize_model(model(), config(bits, **others)),
        load_and_quantize_model(empty(), config(bits, **others), saved(tmp_path)),
    ):
        assert replaced(quantized, bits) == ["blocks.0", "blocks.2"]
        dtypes = {name: value.dtype for name, value in quantized.state_dict().items()}
        assert {dtypes[name] for name in ("norm.weight", "norm.bias")} == {torch.float32}
        converted = ("emb.weight", "blocks.1.weight", "blocks.2.bias", "head.weight", "scale")
        assert {dtypes[name] for name in converted} == {torch.bfloat16}
        assert quantized.angles.dtype == torch.float32


def test_a_list_without_names_has_the_head_quantized_too(bits: str) -> None:
    assert replaced(load_and_quantize_model(model(), config(bits, skip_modules=[])), bits) == [*QUANTIZED, "head"]


def test_the_configuration_can_be_used_again(bits: str) -> None:
    shared = config(bits, keep_in_fp32_modules=["norm"])
    load_and_quantize_model(model(), shared)
    assert (shared.skip_modules, shared.keep_in_fp32_modules) == (None, ["norm"])


@pytest.mark.parametrize("device_map", [None, "auto", "sequential", {"": "cpu"}])
def test_a_checkpoint_is_quantized_as_it_is_read(bits: str, device_map: Any, tmp_path: Path) -> None:
    quantized = load_and_quantize_model(empty(), config(bits), saved(tmp_path), device_map)
    assert replaced(quantized, bits) == QUANTIZED
    assert quantized.hf_device_map == {"": "cpu"}
    expected, found = outputs(load_and_quantize_model(model(), config(bits)), quantized)
    assert torch.equal(found, expected)


def test_layers_on_the_disk_are_not_quantized(bits: str, tmp_path: Path) -> None:
    places = {"emb": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "cpu", "norm": "disk", "head": "cpu"}
    places |= {"scale": "cpu", "angles": "cpu"}
    kept = config(bits, skip_modules=["blocks.1", "head"])
    expected = load_and_quantize_model(model(), kept)
    for number, (given, checkpoint) in enumerate([(empty(), saved(tmp_path)), (model(), None)]):
        folder = tmp_path / f"offload{number}"
        quantized = load_and_quantize_model(given, config(bits), checkpoint, places, offload_folder=folder)
        assert replaced(quantized, bits) == ["blocks.0", "blocks.2"]
        assert quantized.blocks[1].weight.device.type == "meta"
        assert torch.equal(*outputs(expected, quantized))
    with pytest.raises(InvalidArgument, match="pass an offload_folder"):
        load_and_quantize_model(empty(), config(bits), tmp_path, places)


def test_a_chosen_map_that_offloads_is_refused_before_anything_is_changed(bits: str, tmp_path: Path) -> None:
    untouched = empty()
    with pytest.raises(InvalidArgument, match=r"device_map='auto': .*head.* would be offloaded.*pass a mapping"):
        load_and_quantize_model(untouched, config(bits), saved(tmp_path), "auto", max_memory={"cpu": 22_000})
    assert replaced(untouched, bits) == []


def test_room_is_counted_in_the_dtypes_that_weights_will_have(bits: str, tmp_path: Path) -> None:
    room = {"cpu": 4 * (32 * 64 * 2 + 64 * 4 + 2) + 3 * 64 * 64 + 4 * 32 * 64}  # the largest layer is kept free
    load_and_quantize_model(empty(), config(bits), saved(tmp_path), "auto", max_memory=room)


def test_a_model_without_values_needs_a_checkpoint(bits: str) -> None:
    with pytest.raises(InvalidArgument, match=r"Model is on the meta device.*expected weights_location"):
        load_and_quantize_model(empty(), config(bits))


def test_a_checkpoint_is_not_read_into_a_model_with_values(
    bits: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quantized = load_and_quantize_model(model(), config(bits), tmp_path / "missing")
    assert "Model has values, which are quantized" in caplog.text
    assert replaced(quantized, bits) == QUANTIZED


def test_a_damaged_checkpoint_leaves_the_model_as_it_was(bits: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    untouched = empty()
    before = {name: type(module) for name, module in untouched.named_modules()}
    with pytest.raises(CheckpointError):
        load_and_quantize_model(untouched, config(bits), tmp_path)
    assert {name: type(module) for name, module in untouched.named_modules()} == before
    assert {parameter.device.type for parameter in untouched.parameters()} == {"meta"}


def test_a_checkpoint_that_lacks_weights_leaves_the_model_as_it_was(bits: str, tmp_path: Path) -> None:
    state = model().state_dict()
    del state["blocks.1.weight"], state["norm.bias"], state["scale"]
    untouched = empty()
    with pytest.raises(InvalidArgument, match=r"lacks blocks\.1\.weight, norm\.bias; expected a checkpoint of Model"):
        load_and_quantize_model(untouched, config(bits), saved(tmp_path, state))
    assert replaced(untouched, bits) == []
    assert {parameter.device.type for parameter in untouched.parameters()} == {"meta"}


def test_a_model_without_linear_layers_is_pointed_out(bits: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_and_quantize_model(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1)), config(bits))
    assert "Sequential has no linear layer to quantize beside 1" in caplog.text


def test_a_checkpoint_of_8_bits_is_read(library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = load_and_quantize_model(model(), config("8"))
    saved(tmp_path, first.state_dict())
    with caplog.at_level(logging.WARNING):
        second = load_and_quantize_model(empty(), config("8"), tmp_path)
    assert "not used when" not in caplog.text
    assert torch.equal(*outputs(first, second))


def test_one_tensor_that_is_set_is_quantized(bits: str) -> None:
    quantized, value = load_and_quantize_model(model(), config(bits)), model().blocks[1].weight.detach()
    with bnb.layers_replaced(given := empty(), ["blocks.1"], config(bits)):
        set_module_tensor_to_device(given, "blocks.1.weight", "cpu", value=value)
        set_module_tensor_to_device(given, "blocks.1.bias", "cpu", value=model().blocks[1].bias.detach())
    row = torch.rand(2, 64)
    assert torch.equal(given.blocks[1](row), quantized.blocks[1](row))
    if bits == "8":
        state = quantized.blocks[1].state_dict()
        with bnb.layers_replaced(given := empty(), ["blocks.1"], config(bits)):
            pass
        given.blocks[1].bias = quantized.blocks[1].bias
        rows = {"value": state["weight"], "fp16_statistics": state["SCB"]}
        set_module_tensor_to_device(given, "blocks.1.weight", "cpu", **rows)
        assert torch.equal(given.blocks[1](row), quantized.blocks[1](row))


def test_a_device_that_the_library_does_not_know_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported_torch_devices", {"cuda"})
    with pytest.raises(InvalidArgument, match="does not work on cpu, but on cuda; upgrade it"):
        load_and_quantize_model(model(), config("8"))
