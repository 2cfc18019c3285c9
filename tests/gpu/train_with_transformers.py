"""Trainer of transformers on the GPU, as users write it. Arguments: the number of steps, and the precision.

Prints where ``accelerate`` comes from, the device, and the losses.
"""

from __future__ import annotations

import json
import sys

import accelerate
from tiny_language_model import Rows, model
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=sys.argv[2] == "bf16",
    fp16=sys.argv[2] == "fp16",
    seed=7,
    dataloader_pin_memory=True,
)
trainer = Trainer(model(), arguments, train_dataset=Rows(64), eval_dataset=Rows(10))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
found = {
    "file": accelerate.__file__,
    "device": str(next(trainer.model.parameters()).device),
    "losses": [*losses, trainer.evaluate()["eval_loss"]],
}
print("FOUND", json.dumps(found), flush=True)
