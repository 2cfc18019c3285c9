"""Whether what a run has saved can be loaded, by as many processes as have saved it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.storm.draw import Fault

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def visible(project: Path) -> list[Path]:
    """The checkpoints that anyone sees, the newest last."""
    folder = project / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return [folder / name for name in sorted(filter(_NUMBERED.fullmatch, names), key=lambda name: _number(Path(name)))]


def load(line: str, project: str, name: str) -> str:
    """Loads a checkpoint as the run would go on with it. Returns what says why that is impossible."""
    import torch
    from tests.storm.program import Registered, accelerator, layers

    from accelerate_cpp.errors import CheckpointError

    fault = Fault.parse(line)
    run = accelerator(fault.training, fault.size, project)
    model = layers()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    registered = Registered(None, [0])
    run.register_for_checkpointing(registered)
    try:
        run.load_state(name)
    except CheckpointError as error:
        return str(error)
    run.end_training()
    return "" if registered.step == _number(Path(name)) else f"it is that of step {registered.step}"


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint_"))


def problem(fault: Fault, project: Path, spoiled: str, saved: int) -> str:
    """What is wrong with the newest visible checkpoint; empty if it loads, or none has to be there.

    Args:
        spoiled: a file that was spoiled on purpose; its checkpoint must be refused, and the newest other one load.
        saved: the newest step after which a rank went on, as its save had returned; -1 for none.
    """
    from processes import run_processes

    checkpoints = visible(project)
    newest = _number(checkpoints[-1]) if checkpoints else -1
    if newest < saved:
        return f"checkpoint_{saved} is lost, though its save had returned; the newest is number {newest}"
    if not checkpoints:
        return ""
    refused = [path for path in checkpoints if f"/{path.name}/" in spoiled]
    whole = [path for path in checkpoints if path not in refused]
    for path in (*refused, *whole[-1:]):
        answers = run_processes(load, fault.size, fault.render(), str(project), str(path), timeout=300)
        if path in refused and not all(answers):
            return f"{path}, which was spoiled, was loaded"
        if path not in refused and any(answers):
            return f"{path}: {max(answers)}"
    return ""
