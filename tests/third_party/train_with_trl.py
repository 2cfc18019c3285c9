"""Supervised fine-tuning through TRL; with the argument ``sharded``, of a model in shards."""

from __future__ import annotations

import sys

import accelerate
from datasets import Dataset
from tiny_language_model import model, texts, tokenizer
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
    "out",
    max_steps=16,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
    max_length=16,
    dataset_num_proc=1,
    fsdp="sharded" in sys.argv,
)
data = Dataset.from_dict({"text": texts(64)})
trainer = SFTTrainer(model(), args=arguments, train_dataset=data, processing_class=tokenizer())
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
place = (trainer.accelerator.process_index, trainer.accelerator.num_processes)
plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
stage = "whole" if plugin is None else "gathered" if plugin.stage is None else f"ZeRO-{plugin.stage}"
print(*place, accelerate.__file__, losses[0], losses[-1], stage, flush=True)
