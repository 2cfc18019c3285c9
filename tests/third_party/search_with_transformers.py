"""A search for hyper-parameters by transformers' Trainer. Argument: ``optuna`` or ``ray``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accelerate
from tiny_language_model import Rows, model
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=4
)
trainer = Trainer(args=arguments, model_init=model, train_dataset=Rows(32), eval_dataset=Rows(10))


def space(trial: Any) -> dict[str, Any]:
    if sys.argv[1] == "optuna":
        return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 1e-2])}
    from ray import tune

    return {"learning_rate": tune.grid_search([1e-6, 1e-2])}


others: dict[str, Any] = {}
if sys.argv[1] == "ray":
    others["storage_path"] = str(Path("results").absolute())
else:
    import optuna

    others["sampler"] = optuna.samplers.GridSampler({"learning_rate": [1e-6, 1e-2]})
best = trainer.hyperparameter_search(space, backend=sys.argv[1], n_trials=1 + (sys.argv[1] == "optuna"), **others)
if best is not None:
    print(accelerate.__file__, trainer.accelerator.num_processes, best.hyperparameters["learning_rate"], flush=True)
