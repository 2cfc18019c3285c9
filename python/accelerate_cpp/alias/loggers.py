"""The loggers of this package. Under the alias, the original's loggers are their parents.

A record of ``accelerate_cpp.placement.checkpoint_loading``, say, is then also heard by who listens to
``accelerate.utils.modeling``, and that logger's level counts: it is the parent of ours. Above ``accelerate`` is
``accelerate_cpp``, so that who listens to the whole of this package hears it, too.
"""

from __future__ import annotations

import logging

_OWN, _ORIGINAL = "accelerate_cpp", "accelerate"

ORIGINAL_OF: dict[str, str] = {
    "checkpoint.background": "checkpointing",
    "checkpoint.checkpoints_of_run": "checkpointing",
    "checkpoint.finding": "checkpointing",
    "checkpoint.folder": "checkpointing",
    "checkpoint.safetensors_file": "utils.other",
    "checkpoint.writing": "checkpointing",
    "checkpoint.layout": "checkpointing",
    "checkpoint.participants": "checkpointing",
    "comm": "state",
    "commands.to_fsdp2": "commands.to_fsdp2",
    "devices.device": "utils.imports",
    "parallel.data_parallel_strategy": "accelerator",
    "parallel.sharded.widened_weights": "utils.fsdp_utils",
    "parallel.tensor.probe": "accelerator",
    "prepare.megatron.preparing": "accelerator",
    "prepare.megatron.recompute": "utils.megatron_lm",
    "quantization.bitsandbytes": "utils.bnb",
    "placement.checkpoint_loading": "utils.modeling",
    "placement.device_map": "utils.modeling",
    "placement.device_memory": "utils.modeling",
    "placement.model_dispatch": "big_modeling",
    "runtime.preemption": "accelerator",
    "utils.environment": "utils.environment",
    "plugins.fsdp": "utils.dataclasses",
    "utils.imports": "utils.imports",
    "utils.memory": "utils.memory",
    "placement.module_hooks": "big_modeling",
    "placement.offloaded_modules": "utils.modeling",
    "utils.other": "utils.other",
    "placement.tied_parameters": "utils.modeling",
}
"""For each logger of this package that of the original which would log the same."""


def answer_to_original() -> None:
    """Puts the original's loggers above those of this package; doing so again changes nothing."""
    for name in sorted({name.rpartition(".")[0] for name in ORIGINAL_OF}):
        logging.getLogger(f"{_OWN}.{name}".rstrip("."))  # or it would come between, if it were made later
    for own, original in ORIGINAL_OF.items():
        logging.getLogger(f"{_OWN}.{own}").parent = logging.getLogger(f"{_ORIGINAL}.{original}")
    logging.getLogger(_ORIGINAL).parent = logging.getLogger(_OWN)
    root = logging.getLogger()
    root.setLevel(root.level)  # forgets which levels were looked up before
