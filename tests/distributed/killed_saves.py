"""A run that is killed inside ``save_state``, at a place that is drawn beforehand and can be drawn again.

Saving passes through phases, each of them a function of the package. The run counts the calls that each phase makes
while it saves once without being disturbed; in the next save it kills at the drawn fraction of the drawn phase. What
is trained is known from one process of plain torch, so each checkpoint can be compared with what it has to hold.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SHARDED = ("FSDP2 in shards", "FSDP2 whole", "ZeRO 1", "ZeRO 2", "ZeRO 3", "pipeline")
ENGINES = ("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3")
VICTIMS = ("this rank", "other rank", "all ranks", "launcher")
ROWS, KEPT = 12, 2
STEPS = 400
"""After that many the oracle ends."""


@dataclass(frozen=True)
class Draw:
    """One kill.

    Attributes:
        rank: in whose phase it happens.
        phase: one of :func:`phases_of`.
        fraction: of the calls of the phase, after which it happens.
        victim: one of ``VICTIMS``.
    """

    layout: str
    blocking: bool
    rank: int
    phase: str
    fraction: float
    victim: str

    @classmethod
    def of(cls, layout: str, blocking: bool, chance: random.Random) -> Draw:
        phase, on_main = chance.choice(phases_of(layout, blocking))
        victim = chance.choice(VICTIMS)
        return cls(layout, blocking, 0 if on_main else chance.randrange(2), phase, round(chance.random(), 3), victim)


def phases_of(layout: str, blocking: bool) -> list[tuple[str, bool]]:
    """The phases of a save, in their order, and whether only rank 0 passes through each."""
    own = layout in ENGINES
    phases = [("of engines" if own else "collecting", False)]
    phases += [] if blocking or own else [("copying", False)]
    phases += [("agreeing", False), ("writing", False), ("syncing", False)]
    phases += [("index", True)] if layout not in (*ENGINES, "FSDP2 whole") else []
    return [*phases, ("manifest", True), ("moving", True), ("removing old ones", True)]


class Phases:
    """Counts the calls in the phases of saving, and acts after a certain number of them in one phase."""

    def __init__(self) -> None:
        from accelerate_cpp.checkpoint import checkpoints_of_run, folder, writing
        from accelerate_cpp.checkpoint.engine_states import EngineStates
        from accelerate_cpp.checkpoint.files import ChecksummedFile
        from accelerate_cpp.checkpoint.layout import StateFile
        from accelerate_cpp.checkpoint.manifest import Manifest
        from accelerate_cpp.checkpoint.participants import Participants
        from accelerate_cpp.checkpoint.sharded_folder import ShardedFolder

        self.counts: dict[str, int] = {}
        self._at: tuple[str, int] | None = None
        self._act: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        functions: list[tuple[str, Any, str]] = [
            ("collecting", checkpoints_of_run, "parts_of"),
            ("of engines", EngineStates, "write"),
            ("copying", writing, "snapshot"),
            ("agreeing", Participants, "gather"),
            ("writing", StateFile, "write"),
            ("writing", ShardedFolder, "write"),
            ("syncing", ChecksummedFile, "finish"),
            ("syncing", folder, "_sync_tree"),
            ("index", ShardedFolder, "write_index"),
            ("manifest", Manifest, "write"),
            ("moving", writing, "commit"),
            ("removing old ones", writing, "prune"),
        ]
        for phase, where, name in functions:
            setattr(where, name, self._counted(phase, getattr(where, name)))

    def at(self, phase: str, fraction: float, act: Callable[[], None]) -> None:
        """From now on ``act`` is called once, after this fraction of the calls that were counted in ``phase``."""
        assert self.counts.get(phase), f"the save before did not pass through {phase}: {self.counts}"
        self._at, self._act = (phase, int(fraction * self.counts[phase])), act

    def _counted(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            outer = sys.getprofile()

            def look(*event: Any) -> None:
                if outer is not None:
                    outer(*event)
                self._count(phase)

            sys.setprofile(look)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(outer)

        return inside

    def _count(self, phase: str) -> None:
        with self._lock:
            count = self.counts[phase] = self.counts.get(phase, 0) + 1
            acts = self._at is not None and self._at[0] == phase and count > self._at[1]
            if acts:
                self._at = None
        if acts:
            self._act()


def network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 3))


def adamw(model: Any) -> Any:
    """Whose steps do not magnify the rounding of small gradients."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def batch(step: int) -> tuple[Any, Any]:
    """That of all processes together."""
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)


def loss_of(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).square().mean()


class Oracle:
    """Trains one process with plain torch, as far as it is asked."""

    def __init__(self) -> None:
        self._model, self._steps = network(), 0
        self._optimizer = adamw(self._model)

    def weights(self, steps: int) -> dict[str, Any]:
        """After ``steps`` steps; they may not get fewer."""
        assert steps >= self._steps
        while self._steps < steps:
            inputs, targets = batch(self._steps)
            loss_of(self._model(inputs), targets).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._steps += 1
        return {name: value.clone() for name, value in self._model.state_dict().items()}


class Progress:
    """The number of steps, as a part of each checkpoint."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Training:
    """The run of a layout, with everything that it checkpoints into ``folder``; it trains as the oracle does."""

    def __init__(self, layout: str, folder: str, limit: int | None = KEPT) -> None:
        from accelerate_cpp import Accelerator
        from accelerate_cpp.utils import ProjectConfiguration

        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=limit)
        self.run = Accelerator(cpu=True, project_config=project, **plugins_of(layout))
        self.layout, self.progress, self.oracle = layout, Progress(), Oracle()
        model = network()
        self.model, self.optimizer = self.run.prepare(model, adamw(model))
        self.run.register_for_checkpointing(self.progress)

    def step(self) -> None:
        inputs, targets = batch(self.progress.steps)
        if self.layout == "pipeline":
            self.run.train_batch(inputs, loss_of, targets)
        else:
            own = [rows.chunk(self.run.num_processes)[self.run.process_index] for rows in (inputs, targets)]
            self.run.backward(loss_of(self.model(own[0]), own[1]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.steps += 1

    def check(self) -> None:
        """Compares the weights with those of one process. A collective."""
        import torch

        found = self.run.get_state_dict(self.model)
        if self.run.is_main_process:
            expected = self.oracle.weights(self.progress.steps)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def plugins_of(layout: str) -> dict[str, Any]:
    """Arguments of the ``Accelerator``."""
    from accelerate_cpp import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.utils import PipelineParallelConfig

    if layout == "plain":
        return {}
    if layout == "pipeline":
        return {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig())}
    if layout in ENGINES:
        zero = {"stage": int(layout[-1]), "stage3_gather_16bit_weights_on_model_save": True}
        config = {
            "train_micro_batch_size_per_gpu": ROWS // 2,
            "zero_optimization": zero,
            "gradient_clipping": 0.0,
        }
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    options: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 200}
    options["state_dict_type"] = "FULL_STATE_DICT" if layout == "FSDP2 whole" else "SHARDED_STATE_DICT"
    if layout.startswith("ZeRO"):
        options["zero_stage"] = int(layout[-1])
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


def told(folder: str, *words: Any) -> None:
    """Appends a line to what the run has told, which outlives the process."""
    with (Path(folder) / "told").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def goes_on_until_it_is_killed(folder: str, draw: Draw) -> None:
    """Continues from the newest checkpoint, saves once, and is killed in the next save."""
    phases = Phases()
    training = Training(draw.layout, folder)
    run, progress = training.run, training.progress
    pids = _everyones(os.getpid(), run.num_processes)
    told(folder, "pids", *pids) if run.is_main_process else None
    if run.resume():
        training.check()
        told(folder, "loaded", progress.steps) if run.is_main_process else None

    def save() -> None:
        training.step()
        training.check()
        phases.counts.clear()
        run.save_state(blocking=draw.blocking)
        run.wait_for_checkpoint()
        told(folder, "saved", progress.steps) if run.is_main_process else None

    def kill() -> None:
        told(folder, "killing", progress.steps)
        if draw.victim == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            return
        others = [pid for pid in pids if pid != os.getpid()]
        for pid in others if draw.victim != "this rank" else ():
            os.kill(pid, signal.SIGKILL)
        if draw.victim != "other rank":
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(max(2, 3 - progress.steps)):  # the last one removes one old checkpoint, as the next will
        save()
    left = sorted(os.listdir(Path(folder, "checkpoints")))
    assert left == sorted(f"checkpoint_{progress.steps - back}" for back in (1, 2)), left
    run.wait_for_everyone()
    if run.process_index == draw.rank:
        phases.at(draw.phase, draw.fraction, kill)
    while progress.steps < STEPS:  # whose launcher is killed goes on until it is ended, too
        save()


def _everyones(value: int, count: int) -> list[int]:
    import torch.distributed as dist

    values: list[Any] = [None] * count
    dist.all_gather_object(values, value)
    return values


def loads(folder: str, layout: str) -> int:
    """Continues from the newest checkpoint for a step, and returns what that was."""
    training = Training(layout, folder)
    assert training.run.resume()
    loaded = training.progress.steps
    training.check()
    training.step()
    training.check()
    return loaded


if __name__ == "__main__":
    goes_on_until_it_is_killed(sys.argv[1], Draw(**json.loads(sys.argv[2])))
