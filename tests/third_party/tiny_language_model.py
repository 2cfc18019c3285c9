"""What the scripts share: a tiny model and texts for it, of which nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]]


def tokenizer() -> PreTrainedTokenizerFast:
    """Of ten words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")


def model() -> GPT2LMHeadModel:
    """The same on every process."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 1
    return GPT2LMHeadModel(config)


def texts(count: int) -> list[str]:
    """Numbers that count up, from different beginnings."""
    return [" ".join(WORDS[2 + (start + step) % 10] for step in range(8)) for start in range(count)]


class Rows(torch.utils.data.Dataset):
    """The texts as the Trainer of transformers takes them."""

    def __init__(self, count: int) -> None:
        self._rows = [tokenizer()(text, return_tensors="pt")["input_ids"][0] for text in texts(count)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._rows[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
