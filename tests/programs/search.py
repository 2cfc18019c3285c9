"""A search for hyper-parameters through transformers' Trainer, by ``optuna`` or ``ray``."""

from __future__ import annotations

import argparse
import os
from typing import Any

from program import parser, report
from tiny_language_model import Rows, model
from transformers import Trainer, TrainingArguments

RATES = [1e-6, 1e-3, 1e-2]


def space(backend: str) -> Any:
    if backend == "optuna":
        return lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", RATES)}
    from ray import tune

    return lambda _: {"learning_rate": tune.grid_search(RATES)}


def start_ray() -> None:
    """Starts Ray, which gives its processes half a minute for that: a busy machine may need longer."""
    import ray

    for _ in range(4):
        try:
            ray.init(include_dashboard=False)
            return
        except Exception as error:  # Ray has no type of its own for it
            print(f"Ray did not start: {error}")
            ray.shutdown()
    ray.init(include_dashboard=False)


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which let the search go through all rates."""
    if arguments.task == "ray":
        start_ray()
        place = os.path.join(os.path.abspath(arguments.output_dir), "results")
        return {"n_trials": 1, "storage_path": place, "resources_per_trial": {"cpu": 1}}
    import optuna

    return {"n_trials": len(RATES), "sampler": optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)}


def main(arguments: argparse.Namespace) -> None:
    settings = TrainingArguments(
        arguments.output_dir,
        max_steps=arguments.max_train_steps,
        per_device_train_batch_size=arguments.train_batch_size,
        per_device_eval_batch_size=arguments.train_batch_size,
        eval_strategy="steps",
        eval_steps=arguments.max_train_steps,
        report_to=[],
        use_cpu=True,
        seed=7,
    )
    trainer = Trainer(args=settings, model_init=model, train_dataset=Rows(24), eval_dataset=Rows(8))
    best = trainer.hyperparameter_search(space(arguments.task), backend=arguments.task, **options(arguments))
    if best is not None:
        figures = [best.objective, best.hyperparameters["learning_rate"]]
        report(arguments.output_dir, figures, trainer.accelerator)


if __name__ == "__main__":
    main(parser().parse_args())
