"""The idioms of the scripts of Transformers that have a loop of their own: ``glue`` or ``clm``.

As there: every loader is prepared, metrics are gathered without the samples that fill up a last batch, the folders of
checkpoints say how far the run was, and a run that goes on skips the batches that it has seen.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from program import report
from tiny_language_model import model, texts, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, GPT2ForSequenceClassification, default_data_collator, get_scheduler

logger = get_logger(__name__)


def data(task: str, count: int) -> list[dict[str, Any]]:
    """Texts; for ``glue`` of several lengths, and whether they begin with an even number."""
    words = tokenizer()
    if task == "clm":
        rows = [words(text) for text in texts(count)]
        return [{**row, "labels": list(row["input_ids"])} for row in rows]
    shortened = [" ".join(text.split()[: 3 + number % 5]) for number, text in enumerate(texts(count))]
    return [{**words(text), "labels": number % 2} for number, text in enumerate(shortened)]


class Run:
    """One run of a script."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.classifies = arguments.task == "glue"
        self.accelerator = Accelerator(
            gradient_accumulation_steps=1, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
        )
        logger.info(self.accelerator.state, main_process_only=False)
        set_seed(3)
        language = model()
        self.model: Any = GPT2ForSequenceClassification(language.config) if self.classifies else language
        self.load_data()
        self.prepare()

    def load_data(self) -> None:
        batch, classifies = self.arguments.per_device_train_batch_size, self.classifies
        with self.accelerator.main_process_first():
            self.rows = data(self.arguments.task, 12 if classifies else 8)
            self.evaluation_rows = data(self.arguments.task, 9)
        collator = DataCollatorWithPadding(tokenizer()) if classifies else default_data_collator
        self.train_data = DataLoader(self.rows, shuffle=True, collate_fn=collator, batch_size=batch)
        self.evaluation_data = DataLoader(self.evaluation_rows, collate_fn=collator, batch_size=batch)

    def prepare(self) -> None:
        steps, processes = self.arguments.max_train_steps, self.accelerator.num_processes
        no_decay = ["bias", "ln_"]
        named = list(self.model.named_parameters())
        decayed = [weight for name, weight in named if not any(word in name for word in no_decay)]
        others = [weight for name, weight in named if any(word in name for word in no_decay)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps * processes)
        self.model, self.optimizer, self.train_data, self.evaluation_data, self.schedule = self.accelerator.prepare(
            self.model, optimizer, self.train_data, self.evaluation_data, schedule
        )

    def step(self, batch: Any) -> float:
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))

    def evaluate(self) -> float:
        """The accuracy; of a language model the perplexity."""
        self.model.eval()
        right, losses = 0, []
        for batch in self.evaluation_data:
            with torch.no_grad():
                outputs = self.model(**batch)
            if self.classifies:
                predictions = outputs.logits.argmax(dim=-1)
                predictions, references = self.accelerator.gather_for_metrics((predictions, batch["labels"]))
                right += int((predictions == references).sum())
            else:
                rows = outputs.logits.float()[:, :-1].transpose(1, 2)
                each = torch.nn.functional.cross_entropy(rows, batch["labels"][:, 1:], reduction="none").mean(1)
                losses.append(self.accelerator.gather_for_metrics(each))
        if self.classifies:
            return right / len(self.evaluation_rows)
        gathered = torch.cat(losses)
        assert len(gathered) == len(self.evaluation_rows)
        return math.exp(gathered.mean())

    def resume(self) -> tuple[int, int]:
        """The epoch with which to go on, and the steps of it that are done."""
        checkpoint = self.arguments.resume_from_checkpoint
        self.accelerator.print(f"Resumed from checkpoint: {checkpoint}")
        self.accelerator.load_state(checkpoint)
        kind, number = os.path.splitext(os.path.basename(checkpoint))[0].split("_")
        if kind == "epoch":
            return int(number) + 1, 0
        return divmod(int(number), len(self.train_data))

    def save(self, name: str) -> None:
        self.accelerator.save_state(os.path.join(self.arguments.output_dir, name))


def train(arguments: argparse.Namespace) -> None:
    run = Run(arguments)
    by_epoch = arguments.checkpointing_steps == "epoch"
    epoch, skipped = run.resume() if arguments.resume_from_checkpoint else (0, 0)
    done = epoch * len(run.train_data) + skipped
    losses: list[float] = []
    for number in range(epoch, math.ceil(arguments.max_train_steps / len(run.train_data))):
        run.model.train()
        run.train_data.set_epoch(number)  # which a run that goes on does not know by itself
        active = run.accelerator.skip_first_batches(run.train_data, skipped) if skipped else run.train_data
        skipped = 0
        for batch in active:
            losses.append(run.step(batch))
            done += 1
            if not by_epoch and done % int(arguments.checkpointing_steps) == 0:
                run.save(f"step_{done}")
        evaluated = run.evaluate()
        if by_epoch:
            run.save(f"epoch_{number}")
    run.accelerator.wait_for_everyone()
    run.accelerator.unwrap_model(run.model).save_pretrained(
        arguments.output_dir,
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
    )
    report(arguments.output_dir, losses, run.accelerator, evaluated=[evaluated])
    run.accelerator.end_training()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("task", choices=["glue", "clm"])
    options.add_argument("--output_dir", required=True)
    options.add_argument("--per_device_train_batch_size", type=int, required=True)
    options.add_argument("--max_train_steps", type=int, required=True)
    options.add_argument("--checkpointing_steps", required=True)
    options.add_argument("--resume_from_checkpoint")
    train(options.parse_args())
