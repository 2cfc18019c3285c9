"""Makes what programs load, in the folder that is its argument: tiny models, and data for each kind of training.

Nothing is downloaded, and each model is one that the program finds where it looks for any other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiny_language_model import model, texts, tokenizer
from transformers import BertConfig, BertModel, GPT2Config, GPT2ForSequenceClassification

ROWS = 24


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_models(folder: Path) -> None:
    language, words = model(), tokenizer()
    language.save_pretrained(folder / "language_model")
    GPT2ForSequenceClassification(GPT2Config(**language.config.to_dict() | {"num_labels": 1})).save_pretrained(
        folder / "reward_model"
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(words), **sizes, **no_dropout)).save_pretrained(folder / "encoder")
    for name in ("language_model", "reward_model", "encoder"):
        words.save_pretrained(folder / name)


def write_data(folder: Path) -> None:
    """Numbers that count up are right, those that count down are wrong."""
    up = texts(ROWS)
    questions, right = [" ".join(text.split()[:3]) for text in up], [" " + " ".join(text.split()[3:]) for text in up]
    wrong = [" " + " ".join(reversed(text.split())) for text in right]
    pairs = [
        {"prompt": question, "chosen": good, "rejected": bad}
        for question, good, bad in zip(questions, right, wrong, strict=True)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair["rejected" if number % 3 else "chosen"], "label": number % 3 == 0}
        for number, pair in enumerate(pairs)
    ]
    write_rows(folder / "texts", [{"text": text} for text in up])
    write_rows(folder / "pairs", pairs)
    write_rows(folder / "judged", judged)
    write_rows(folder / "questions", [{"prompt": question} for question in questions])
    write_task(folder / "task", pairs)


def write_task(folder: Path, pairs: list[dict[str, Any]]) -> None:
    """A task of lm_eval: of two continuations the one that counts up."""
    write_rows(folder, [pair | {"choices": [pair["chosen"], pair["rejected"]]} for pair in pairs])
    lines = {
        "task": "counting",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "train.jsonl")}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "counting.yaml").write_text(json.dumps(lines))  # which is YAML, too


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
    write_data(Path(sys.argv[1]))
