"""What the programs have in common: their arguments, and the report of their losses."""

from __future__ import annotations

import argparse
import json
import os

from accelerate import Accelerator


def parser() -> argparse.ArgumentParser:
    """With the options that test_programs.py passes."""
    common = argparse.ArgumentParser()
    common.add_argument("task")
    common.add_argument("--output_dir", required=True)
    common.add_argument("--train_batch_size", type=int, default=4)
    common.add_argument("--max_train_steps", type=int, default=6)
    common.add_argument("--checkpointing_steps", type=int, default=2)
    common.add_argument("--checkpoints_total_limit", type=int, default=2)
    common.add_argument("--resume_from_checkpoint", action="store_true")
    common.add_argument("--model", help="a folder that make_inputs.py has made")
    return common


def report(folder: str, losses: list[float], accelerator: Accelerator, **others: list[float]) -> None:
    """Writes ``losses.json`` on the main process."""
    if accelerator.is_main_process:
        with open(os.path.join(folder, "losses.json"), "w") as file:
            json.dump({"losses": losses, **others}, file)
