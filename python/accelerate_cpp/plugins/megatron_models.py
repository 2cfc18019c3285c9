"""Sizes of models of transformers, as arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument

__all__ = ["MODEL_CONFIGS_TO_MEGATRON_PARSERS", "add_model_config_to_megatron_parser", "write_model_arguments"]

_LONGEST_OF_T5 = 512
"""What the configuration of T5 said before transformers 5, of which positions are relative."""

Parser = Callable[[Any, Any, Any], Any]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}
"""The functions that write the arguments for a model, by the ``model_type`` of its configuration."""


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Decorates a function to write the arguments for models whose ``config.model_type`` is ``model_type``.

    It is called with the plugin, the model and the first batch, or ``None``, and changes
    ``plugin.megatron_lm_default_args``.
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


def write_model_arguments(plugin: Any, model: torch.nn.Module, batch: Mapping[str, Any] | None) -> None:
    """Writes the arguments for ``model`` into ``plugin.megatron_lm_default_args``.

    Raises:
        InvalidArgument: no function is registered for its kind, and it is no decoder.
    """
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", "")).lower()
    if kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS and type(model).__name__.endswith("ForCausalLM"):
        _decoder(plugin, model, batch, "HuggingFaceTokenizer")
    elif kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
        known = ", ".join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)
        raise InvalidArgument(
            f"Megatron-LM: a model of type {kind!r}; expected one of {known}, or register a function for it with "
            "add_model_config_to_megatron_parser"
        )
    else:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](plugin, model, batch)
    plugin.megatron_lm_default_args["model_return_dict"] = config.return_dict


def _length(given: int | None, batch: Mapping[str, Any] | None, name: str, longest: int) -> int:
    """The length of sequences: ``given``, that of the batch, or the maximum of the model."""
    if given is not None:
        return given
    return longest if batch is None else int(batch[name].shape[1])


@add_model_config_to_megatron_parser("megatron-bert")
def _bert(plugin: Any, model: Any, batch: Mapping[str, Any] | None) -> None:
    config = model.config
    given = plugin.encoder_seq_length if plugin.seq_length is None else plugin.seq_length
    plugin.seq_length = _length(given, batch, "input_ids", config.max_position_embeddings)
    plugin.megatron_lm_default_args.update(
        seq_length=plugin.seq_length,
        model_type_name="bert",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        pretraining_flag="maskedlm" in type(model).__name__.lower(),
        orig_vocab_size=config.vocab_size,
        num_labels=config.num_labels,
    )


@add_model_config_to_megatron_parser("gpt2")
def _gpt2(plugin: Any, model: Any, batch: Mapping[str, Any] | None) -> None:
    config = model.config
    given = plugin.decoder_seq_length if plugin.seq_length is None else plugin.seq_length
    plugin.seq_length = _length(given, batch, "input_ids", config.n_positions)
    plugin.megatron_lm_default_args.update(
        seq_length=plugin.seq_length,
        return_logits=plugin.return_logits,
        tokenizer_type="GPT2BPETokenizer",
        model_type_name="gpt",
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
    )


@add_model_config_to_megatron_parser("t5")
def _t5(plugin: Any, model: Any, batch: Mapping[str, Any] | None) -> None:
    config = model.config
    longest = getattr(config, "n_positions", _LONGEST_OF_T5)
    plugin.encoder_seq_length = _length(plugin.encoder_seq_length, batch, "input_ids", longest)
    plugin.decoder_seq_length = _length(plugin.decoder_seq_length, batch, "labels", longest)
    plugin.megatron_lm_default_args.update(
        encoder_seq_length=plugin.encoder_seq_length,
        decoder_seq_length=plugin.decoder_seq_length,
        model_type_name="t5",
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        num_attention_heads=config.num_heads,
        max_position_embeddings=longest,
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
    )


@add_model_config_to_megatron_parser("llama")
def _llama(plugin: Any, model: Any, batch: Mapping[str, Any] | None) -> None:
    _decoder(plugin, model, batch, "Llama2Tokenizer")


def _decoder(plugin: Any, model: Any, batch: Mapping[str, Any] | None, tokenizer: str) -> None:
    config = model.config
    own = getattr(config, "max_sequence_length", None)
    given = plugin.seq_length or own or plugin.decoder_seq_length
    plugin.seq_length = _length(given, batch, "input_ids", config.max_position_embeddings)
    plugin.megatron_lm_default_args.update(
        return_logits=plugin.return_logits,
        tokenizer_type=tokenizer,
        model_type_name="gpt",
        num_layers=config.num_hidden_layers,
        pretraining_flag=True,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        orig_vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=plugin.seq_length,
    )
