"""Models without data: where their configuration is found, and what is built of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument, MissingLibrary, Unavailable
from accelerate_cpp.placement.empty_models import empty_model, inputs_of
from accelerate_cpp.placement.model_memory import activation_bytes, model_size, saved_bytes

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
TEXT_MODELS = {
    "BertForMaskedLM": {"model_type": "bert", "max_position_embeddings": 64, **SIZES},
    "BertForSequenceClassification": {"model_type": "bert", "max_position_embeddings": 64, **SIZES},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99},
    "LlamaForCausalLM": {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True, **SIZES},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 32, "d_ff": 48, "num_layers": 2, "vocab_size": 99},
}


def configured(folder: Path, content: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A timm that has one architecture; the names that it was asked for."""
    asked: list[str] = []

    def create_model(name: str, pretrained: bool) -> nn.Module:
        asked.append(name)
        if name.endswith("unknown"):
            raise RuntimeError(f"Unknown model ({name})\nand more")
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
        model.pretrained_cfg = {"input_size": (3, 8, 8)}
        return model

    module = SimpleNamespace(create_model=create_model, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


@pytest.mark.parametrize("model_class", TEXT_MODELS)
def test_a_folder_is_the_model_that_its_configuration_names(model_class: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    content = {**TEXT_MODELS[model_class], "architectures": [model_class]}
    found = empty_model(configured(tmp_path, content), batch_size=2, sequence_length=10)
    assert found.title == f"{model_class} of transformers"
    assert found.batch == "2 x 10 tokens"
    real = getattr(transformers, model_class)(transformers.AutoConfig.from_pretrained(tmp_path)).float().train()
    tensors = [*real.parameters(), *real.buffers()]
    assert model_size(found.module, "float32").total == sum(tensor.nbytes for tensor in tensors)
    args, kwargs = found.make_inputs()
    assert activation_bytes(found.module, found.make_inputs) == saved_bytes(lambda: real(*args, **kwargs), tensors)
    assert real(*args, **kwargs).loss is not None


@pytest.mark.parametrize(
    ("content", "batch"),
    [
        (
            {
                "model_type": "vit",
                "architectures": ["ViTForImageClassification"],
                "image_size": 16,
                "patch_size": 8,
                **SIZES,
            },
            "3 x 3x16x16 pixels",
        ),
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                **{
                    "d_model": 32,
                    "encoder_layers": 1,
                    "decoder_layers": 1,
                    "max_source_positions": 10,
                    "vocab_size": 99,
                },
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "pad_token_id": 0},
            },
            "3 x 20 frames of sound",
        ),
    ],
)
def test_images_and_sound_have_the_shape_that_the_model_takes(
    content: dict[str, Any], batch: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    found = empty_model(configured(tmp_path, content), batch_size=3)
    assert found.batch == batch
    one = empty_model(str(tmp_path / "config.json"), batch_size=1)
    assert activation_bytes(found.module, found.make_inputs) > activation_bytes(one.module, one.make_inputs) > 0


def test_the_class_may_be_chosen(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name = configured(tmp_path, {**TEXT_MODELS["BertForMaskedLM"], "architectures": ["BertForMaskedLM"]})
    assert empty_model(name, model_class="AutoModel").title == "BertModel of transformers"
    with pytest.raises(InvalidArgument, match="--model_class BertFor: transformers has no such class; the nearest is "):
        empty_model(name, model_class="BertFor")


def test_names_that_are_no_models_are_passed_over(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lacking = [name for name in dir(transformers) if type(getattr(transformers, name)).__name__ == "DummyObject"]
    for names in ([5, "pipeline", "Trainer", "PreTrainedModel"], 5, lacking):
        name = configured(tmp_path, {**TEXT_MODELS["BertForMaskedLM"], "architectures": names, "auto_map": [1]})
        assert empty_model(name).title == "BertModel of transformers"


def test_sequences_are_as_long_as_the_model_can_take(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name = configured(tmp_path, TEXT_MODELS["BertForMaskedLM"])
    assert empty_model(name).batch == "1 x 64 tokens"
    with pytest.raises(InvalidArgument, match=r"--sequence_length 65: .* takes at most 64 tokens"):
        empty_model(name, sequence_length=65)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "no-such-model"}, "transformers cannot read its configuration"),
        ({**TEXT_MODELS["BertForMaskedLM"], "num_attention_heads": 5}, "transformers cannot build it"),
        ({**TEXT_MODELS["BertForMaskedLM"], "attn_implementation": "some/kernel"}, "wants 'some/kernel' for 'attn_imp"),
        ({**TEXT_MODELS["BertForMaskedLM"], "attn_implementation": "flash_attention_2"}, "which is code of the Hub"),
        (
            {
                "model_type": "qwen2_5_omni",
                "attn_implementation": {"thinker_config": {"text_config": "some/kernel"}},
            },
            "wants 'some/kernel' for 'attn_imp",
        ),
        (
            {"model_type": "vit", **SIZES, "image_size": [8, 8, 8], "patch_size": 8},
            "expected 3 sizes for 'num_channels",
        ),
    ],
)
def test_what_transformers_refuses_is_one_sentence(content: dict[str, Any], words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InvalidArgument, match=words) as refusal:
        empty_model(configured(tmp_path, content))
    assert "\n" not in str(refusal.value)


def test_an_architecture_of_timm_needs_no_configuration(timm: list[str]) -> None:
    found = empty_model("resnet50", "timm", batch_size=2)
    assert (timm, found.title, found.batch) == (["resnet50"], "Sequential of timm", "2 x 3x8x8 pixels")
    assert {parameter.device.type for parameter in found.module.parameters()} == {"meta"}
    assert activation_bytes(found.module, found.make_inputs) == 4 * 2 * 3 * 8 * 8
    with pytest.raises(InvalidArgument, match=r"timm cannot build it \(RuntimeError: Unknown model \(unknown\)\)"):
        empty_model("unknown", "timm")


def test_a_folder_of_timm_is_told_by_its_configuration(timm: list[str], tmp_path: Path) -> None:
    empty_model(configured(tmp_path, {"architecture": "resnet50"}))
    assert timm == [f"local-dir:{tmp_path}"]


def test_a_name_on_the_hub_is_that_of_its_configuration(
    timm: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    configured(tmp_path, {"architecture": "resnet50"})
    monkeypatch.setattr(hub, "hf_hub_download", lambda *args, **kwargs: str(tmp_path / "config.json"))
    empty_model("timm/resnet50")
    assert timm == ["hf-hub:timm/resnet50"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "someone/model is gated: accept its terms"),
        ("RepositoryNotFoundError", "neither a folder nor a file here, nor is it on the Hub"),
        ("EntryNotFoundError", "someone/model has no config.json on the Hub"),
        ("LocalEntryNotFoundError", "the Hub cannot be reached"),
        (None, r"nor in the cache, and the Hub cannot be reached \(ConnectionError: no network\); pass a folder"),
    ],
)
def test_what_the_hub_does_not_give_is_one_sentence(
    error: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = ConnectionError if error is None else getattr(hub.errors, error)

    class Refused(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, "no network")

        def __str__(self) -> str:
            return "no network"

    class Absent(hub.errors.LocalEntryNotFoundError):  # type: ignore[misc]
        def __init__(self) -> None:
            Exception.__init__(self)

    if error is None:
        Refused.__name__ = "ConnectionError"

    def refuse(*args: Any, local_files_only: bool = False, **kwargs: Any) -> None:
        raise Absent if local_files_only else Refused

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    monkeypatch.setattr(hub.HfApi, "model_info", refuse)
    with pytest.raises(Unavailable, match=words):
        empty_model("someone/model")


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"the folder has no config\.json"):
        empty_model(str(tmp_path))
    with pytest.raises(InvalidArgument, match="does not say for which library it is: pass --library_name"):
        empty_model(configured(tmp_path, {"hidden_size": 3}))
    (tmp_path / "config.json").write_text("no json")
    with pytest.raises(InvalidArgument, match="cannot be read as a model's configuration"):
        empty_model(str(tmp_path))


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("transformers", "timm", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibrary, match="needs the Python package transformers, which is not installed"):
        empty_model(configured(tmp_path, {"model_type": "bert"}))
    with pytest.raises(MissingLibrary, match="needs the Python package timm"):
        empty_model("resnet50", "timm")
    with pytest.raises(MissingLibrary, match="needs the Python package huggingface_hub"):
        empty_model("someone/model")


def test_building_takes_no_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 22016,
    }
    found = empty_model(configured(tmp_path, content), sequence_length=128)
    assert {tensor.device for tensor in found.module.state_dict().values()} == {torch.device("meta")}
    assert activation_bytes(found.module, found.make_inputs) > 2**30


def test_inputs_of_a_model_are_those_to_generate_or_to_train(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    module = empty_model(configured(tmp_path, {**content, "num_hidden_layers": 1})).module
    make_inputs, length = inputs_of(module, 2)
    args, kwargs = make_inputs()
    assert (args, length, kwargs.pop("input_ids").shape) == ((), 64, (2, 64))
    assert kwargs == {"use_cache": False, "logits_to_keep": 1}
    make_inputs, length = inputs_of(module, 3, 10, training=True)
    _, kwargs = make_inputs()
    assert (length, kwargs["labels"].shape, kwargs.keys()) == (10, (3, 10), {"input_ids", "labels", "use_cache"})
    with pytest.raises(InvalidArgument, match=r"^sequence_length 65: LlamaForCausalLM takes at most 64 tokens"):
        inputs_of(module, 1, 65)
    with pytest.raises(InvalidArgument, match="Identity is not a model of transformers"):
        inputs_of(torch.nn.Identity(), 1)
