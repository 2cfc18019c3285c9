"""Trainer of transformers, as users write it.

Arguments: the number of steps; ``resume`` goes on from a checkpoint; a type of state dicts shards the model.
"""

from __future__ import annotations

import sys

import accelerate
from tiny_language_model import Rows, model
from transformers import Trainer, TrainingArguments

layout = next((argument for argument in sys.argv if argument.endswith("_STATE_DICT")), None)
arguments = TrainingArguments(
    "out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    report_to=[],
    use_cpu=True,
    seed=7,
    fsdp=layout is not None,
    fsdp_config=None if layout is None else {"state_dict_type": layout},
)
trainer = Trainer(model(), arguments, train_dataset=Rows(64), eval_dataset=Rows(10))
trainer.train(resume_from_checkpoint="resume" in sys.argv)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
evaluated = trainer.evaluate()["eval_loss"]
state = trainer.accelerator.get_state_dict(trainer.model)
weights = sum(tensor.double().abs().sum().item() for tensor in state.values())
place = (trainer.accelerator.process_index, trainer.accelerator.num_processes)
print(*place, accelerate.__file__, trainer.state.global_step, losses[0], losses[-1], evaluated, weights, flush=True)
