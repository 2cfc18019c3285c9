"""The bytes of the keys and values that a language model keeps for the tokens it has seen."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument

__all__ = ["kv_cache_bytes"]

_LAYERS = ("num_decoder_layers", "decoder_layers")
_NO_ATTENTION = ("linear_attention", "mamba", "conv", "moe", "mlp")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def kv_cache_bytes(
    config: Any,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype,
    source_length: int | None = None,
) -> list[int]:
    """Bytes of the cache of each layer that generates, once ``batch_size`` sequences have ``sequence_length`` tokens.

    They are those of the caches of transformers that grow with the sequences: layers with a sliding window keep as many
    tokens as the next one looks back at, a compressed cache (multi-head latent attention) is counted compressed, and
    layers without attention as nothing. A decoder that looks at an encoder keeps keys and values of its output, too.

    Args:
        config: with the names that transformers uses: ``num_hidden_layers``, ``num_attention_heads``, ``hidden_size``;
            where they apply ``num_key_value_heads``, ``head_dim``, ``layer_types``, ``sliding_window`` and others.
        dtype: of keys and values.
        source_length: what an encoder puts out for a sequence; by default as many tokens, or what it always puts out,
            as that of speech.

    Raises:
        InvalidArgument: ``config`` does not say how many layers or heads there are.
    """
    decoder = _decoder(config)
    cross = 0
    if getattr(config, "is_encoder_decoder", False):
        cross = getattr(config, "max_source_positions", sequence_length) if source_length is None else source_length
    item_bytes = batch_size * _numbers_of_a_token(decoder) * dtype.itemsize
    layers = range(_first(decoder, *_LAYERS, "num_hidden_layers"))
    return [item_bytes * (_tokens_kept(decoder, layer, sequence_length) + cross) for layer in layers]


def _decoder(config: Any) -> Any:
    """The settings of the part that generates: in a model of several parts, the one that writes text."""
    get_text_config = getattr(config, "get_text_config", None)
    is_flat = any(getattr(config, name, None) is not None for name in _LAYERS)
    return config if is_flat or get_text_config is None else get_text_config(decoder=True)


def _first(config: Any, *names: str) -> int:
    """The first of these settings that exists."""
    for name in names:
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    raise InvalidArgument(
        f"the cache size of {type(config).__name__} is unknown: expected one of the attributes {', '.join(names)}, "
        "found none; pass the bytes as class_bytes of a Workload"
    )


def _numbers_of_a_token(config: Any) -> int:
    """How many numbers a layer keeps for each token."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank) + _first(config, "qk_rope_head_dim")
    heads = _first(config, "decoder_attention_heads", "num_attention_heads")
    width = getattr(config, "head_dim", None) or _first(config, "hidden_size") // heads
    if getattr(config, "decoder_attention_heads", None) is None:
        if getattr(config, "num_key_value_heads", None):
            heads = config.num_key_value_heads
        elif getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
            heads = 1
    return 2 * heads * int(width)


def _tokens_kept(config: Any, layer: int, length: int) -> int:
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds else "sliding_attention" if _window(config, "sliding_attention") else "full_attention"
    if kind in _NO_ATTENTION:
        return 0
    window = _window(config, kind)
    return length if window is None else min(length, window - 1)


def _window(config: Any, kind: str) -> int | None:
    found: int | None = getattr(config, _WINDOWS.get(kind, ""), None)
    return found
