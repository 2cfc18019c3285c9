"""Few-shot classification by SetFit: its trainer of encoders, and a classifier of scikit-learn on top."""

from __future__ import annotations

import argparse

from datasets import Dataset
from program import parser, report
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from tiny_language_model import texts


def main(arguments: argparse.Namespace) -> None:
    classifier = SetFitModel(SentenceTransformer(arguments.model, device="cpu"), LogisticRegression())
    data = Dataset.from_dict({"text": texts(10), "label": [int(number >= 5) for number in range(10)]})
    settings = TrainingArguments(
        output_dir=arguments.output_dir,
        batch_size=arguments.train_batch_size,
        max_steps=arguments.max_train_steps,
        body_learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=7,
    )
    trainer = Trainer(classifier, settings, train_dataset=data, eval_dataset=data, metric=accuracy_score)
    trainer.train()
    history = trainer.st_trainer.state.log_history
    losses = [entry["embedding_loss"] for entry in history if "embedding_loss" in entry]
    accuracy = trainer.evaluate().values()
    report(arguments.output_dir, losses, trainer.st_trainer.accelerator, evaluated=list(accuracy))


if __name__ == "__main__":
    main(parser().parse_args())
