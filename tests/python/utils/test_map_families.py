"""Maps of real families of models, from their configurations and without data: those of the original."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.utils as original
import pytest
import torch
import transformers
from torch import nn

from accelerate_cpp.placement.device_map import check_device_map, choose_device_map, infer_auto_device_map
from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.placement.module_sizes import compute_module_sizes

_DECODER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_WHISPER = {"d_model": 64, "encoder_layers": 3, "decoder_layers": 4, "pad_token_id": 0}
_WHISPER |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
_WHISPER |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "vocab_size": 2000},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _DECODER),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 256, "n_layer": 6, "n_head": 8, "vocab_size": 5000}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_DECODER, "vocab_size": 5000}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, "vocab_size": 5000}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 5000}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "vocab_size": 5000}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "vocab_size": 5000}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_GROUPED, "num_hidden_layers": 4, "vocab_size": 5000}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_DECODER, "ffn_dim": 512, "vocab_size": 5000, "word_embed_proj_dim": 256},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GROUPED, "vocab_size": 5000, "tie_word_embeddings": True}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 64, "num_layers": 4, "vocab_size": 2000}),
    "vit": ("ViTConfig", "ViTForImageClassification", _DECODER),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {**_WHISPER, "vocab_size": 2000}),
}


@pytest.fixture(autouse=True)
def _without_logs_of_absent_gpus() -> Iterator[None]:
    """The maps name GPUs that this machine need not have."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    config_class, model_class, options = FAMILIES[request.param]
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        built = getattr(transformers, model_class)(config)
    built.tie_weights()
    return built


def memories(total: int) -> Iterator[dict[Any, int]]:
    """From far too little to plenty, on one to four accelerators, alike and not."""
    for tenths in range(1, 13, 2):
        yield {0: total * tenths // 10, "cpu": total // 2}
        yield {0: total * tenths // 20, 1: total * tenths // 20, "cpu": 2 * total}
        yield {0: total // 4, 1: total * tenths // 20, 2: total // 3}
        yield {0: total * tenths // 30, 1: total // 5, 2: total // 4, 3: total // 3, "cpu": total}


def loads(model: nn.Module, device_map: Any) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = device_of(device_map, name)
        if device is not None:
            found[device] = found.get(device, 0) + tensor.nbytes
    return found


def is_offloaded(device_map: Any) -> bool:
    return bool({"cpu", "disk"} & {*device_map.values()})


def compared(model: nn.Module, find: Callable[..., Any], expect: Callable[..., Any]) -> tuple[int, int]:
    """How many maps are those of the original, and how many fit where the original's offload."""
    same = better = 0
    for memory in memories(int(compute_module_sizes(model)[""])):
        for whole in (None, list(model._no_split_modules or [])):
            found = find(model, max_memory=dict(memory), no_split_module_classes=whole)
            check_device_map(model, found)
            try:
                expected = expect(model, max_memory=dict(memory), no_split_module_classes=whole)
            except IndexError:  # shared parameters in parts that the original has placed or split before
                continue
            if is_offloaded(expected) and not is_offloaded(found):
                better += 1
                assert all(load <= memory[device] for device, load in loads(model, found).items()), memory
            else:
                same += 1
                assert dict(found) == dict(expected), (memory, whole)
    return same, better


@pytest.mark.filterwarnings("ignore:Current model requires", "ignore:the layers that are offloaded")
def test_inferred_maps_are_those_of_the_original_unless_it_offloads_what_fits(model: nn.Module) -> None:
    same, _ = compared(model, infer_auto_device_map, original.infer_auto_device_map)
    assert same >= 24


@pytest.mark.filterwarnings("ignore:Current model requires", "ignore:the layers that are offloaded")
@pytest.mark.parametrize("way", ["auto", "balanced_low_0", "sequential"])
def test_maps_by_name_are_those_of_the_original_unless_it_offloads_what_fits(model: nn.Module, way: str) -> None:
    def expect(model: nn.Module, max_memory: Any, no_split_module_classes: Any) -> Any:
        options = {"no_split_module_classes": no_split_module_classes}
        if way != "sequential":
            low_zero = way == "balanced_low_0"
            max_memory = original.get_balanced_memory(model, max_memory, **options, low_zero=low_zero)
        return original.infer_auto_device_map(model, max_memory, **options)

    same, _ = compared(model, lambda model, **options: choose_device_map(model, way, **options), expect)
    assert same >= 12


def test_the_fullest_device_of_a_balanced_map_has_less_or_within_five_percent_of_the_original(model: nn.Module) -> None:
    total = int(compute_module_sizes(model)[""])
    whole = list(model._no_split_modules or [])
    layers = [
        sum(tensor.nbytes for tensor in module.parameters()) for module in model.modules() if not [*module.children()]
    ]
    for count in (2, 3, 4):
        memory: dict[Any, int] = {**dict.fromkeys(range(count), 2 * total), "cpu": total}
        found = choose_device_map(model, "balanced", memory)
        largest = max(loads(model, found).values())
        assert largest <= total / count + max(layers)
        for blocks in (None, whole):
            found = choose_device_map(model, "balanced", memory, blocks)
            room = original.get_balanced_memory(model, dict(memory), no_split_module_classes=blocks)
            expected = original.infer_auto_device_map(model, room, no_split_module_classes=blocks)
            assert max(loads(model, found).values()) <= 1.05 * max(loads(model, expected).values()), (count, blocks)
