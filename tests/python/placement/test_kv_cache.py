"""The computed size of a cache is that of the cache of a real model, down to the byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.kv_cache import kv_cache_bytes

_BATCH, _SOURCE, _WINDOW = 2, 13, 8
_SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_FALCON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 10}
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_DECODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48}
_SOUND = {"max_source_positions": 15, "max_target_positions": 64, "num_mel_bins": 8}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grouped heads": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "window": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": _WINDOW, "head_dim": 6}),
    "window in some layers": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, "sliding_window": _WINDOW}),
    "other names": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50}),
    "one head": ("FalconConfig", "FalconForCausalLM", _FALCON),
    "no head alone": ("FalconConfig", "FalconForCausalLM", {**_FALCON, "new_decoder_architecture": True}),
    "latent": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_SMALL, **_LATENT, **_EXPERTS}),
    "encoder": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 6, "num_decoder_layers": 3}),
    "encoder with other heads": (
        "BartConfig",
        "BartForConditionalGeneration",
        {**_DECODER, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "vocab_size": 50},
    ),
    "sound": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_DECODER, **_SOUND, **_MARKS, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 50},
    ),
}


def bytes_of_a_run(config: Any, model: Any, length: int) -> list[int]:
    """Of the cache of each layer after a forward pass over ``length`` tokens."""
    tokens = torch.ones(_BATCH, length, dtype=torch.long)
    inputs = {"input_ids": tokens}
    if config.is_encoder_decoder:
        inputs = {"input_ids": torch.ones(_BATCH, _SOURCE, dtype=torch.long), "decoder_input_ids": tokens}
    if model.main_input_name == "input_features":
        del inputs["input_ids"]
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(_BATCH, config.num_mel_bins, frames, dtype=model.dtype)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    caches = [
        getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)
    ]
    layers = zip(*(part.layers for part in caches or [cache]), strict=True)
    return [sum(part.keys.nbytes + part.values.nbytes for part in layer) for layer in layers]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_that_of_a_real_model(name: str) -> None:
    config_class, model_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config).eval()
    source = None if name == "sound" else _SOURCE
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for length in (5, _WINDOW - 1, _WINDOW, 20):
            found = kv_cache_bytes(config, _BATCH, length, dtype, source)
            assert found == bytes_of_a_run(config, model, length), (length, dtype)


def test_an_encoder_puts_out_as_many_tokens_as_there_are_if_nothing_else_is_said() -> None:
    config = transformers.T5Config(d_model=32, d_kv=6, num_decoder_layers=3)
    assert kv_cache_bytes(config, 1, 7, torch.float16) == kv_cache_bytes(config, 1, 7, torch.float16, 7)


def test_layers_without_attention_keep_nothing_and_other_kinds_everything() -> None:
    config = SimpleNamespace(
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_size=8,
        layer_types=["linear_attention", "full_attention", "chunked_attention", "new_kind"],
        attention_chunk_size=3,
    )
    assert kv_cache_bytes(config, 1, 10, torch.float16) == [0, 320, 64, 320]


def test_a_configuration_that_does_not_say_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"SimpleNamespace is unknown: expected one of .*num_hidden_layers"):
        kv_cache_bytes(SimpleNamespace(num_attention_heads=2, head_dim=4), 1, 10, torch.float16)
    with pytest.raises(InvalidArgument, match=r"num_attention_heads, found none; .* class_bytes of a Workload"):
        kv_cache_bytes(SimpleNamespace(num_hidden_layers=2), 1, 10, torch.float16)
