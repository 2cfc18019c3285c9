"""The trainers of libraries with their default order of samples; one task each. Writes the losses as JSON."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from program import parser, report
from tiny_language_model import Rows, model, texts
from transformers import Trainer, TrainingArguments

ROWS = 24


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": arguments.output_dir,
        "per_device_train_batch_size": arguments.train_batch_size,
        "max_steps": arguments.max_train_steps,
        "save_steps": arguments.checkpointing_steps,
        "save_total_limit": arguments.checkpoints_total_limit,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "seed": 7,
    }


def language(arguments: argparse.Namespace) -> Any:
    return Trainer(model(), TrainingArguments(**options(arguments)), train_dataset=Rows(ROWS))


def adapters(arguments: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model(), LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    return Trainer(adapted, TrainingArguments(**options(arguments)), train_dataset=Rows(ROWS))


def sentences(arguments: argparse.Namespace) -> Any:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    whole = SentenceTransformer(arguments.model, device="cpu")
    first, second = texts(ROWS), [*texts(ROWS)[3:], *texts(3)]
    scores = [float(number % 3) / 2 for number in range(ROWS)]
    data = Dataset.from_dict({"sentence1": first, "sentence2": second, "score": scores})
    settings = SentenceTransformerTrainingArguments(**options(arguments))
    return SentenceTransformerTrainer(whole, settings, train_dataset=data, loss=losses.CosineSimilarityLoss(whole))


TASKS = {task.__name__: task for task in (language, adapters, sentences)}


def main(arguments: argparse.Namespace) -> None:
    trainer = TASKS[arguments.task](arguments)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(arguments.output_dir, losses, trainer.accelerator)


if __name__ == "__main__":
    main(parser().parse_args())
