"""What a watched script has done so far, and the findings: the record that all watchers of a check share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelerate_cpp.check.journal import Finding, Journal
from accelerate_cpp.check.source import here
from accelerate_cpp.check.task import Task
from accelerate_cpp.runtime import current


class CheckFinished(SystemExit):
    """Enough has been seen; ends the script as an exit with status 0 would."""

    def __init__(self, because: str) -> None:
        super().__init__(0)
        self.because = because


@dataclass
class Pass:
    """One pass over a loader.

    Attributes:
        where: the loop over it.
        repetitions: how often the loop around that one runs, if it says.
        first_step, first_backward: how many there had been before.
        batches: the number of batches returned so far.
        gathers: names of the methods that gathered from its batches.
        was_cut: whether the check ended it before its last batch.
    """

    loader: Any
    is_prepared: bool
    where: str
    repetitions: int | None
    first_step: int
    first_backward: int
    batches: int = 0
    steps: int = 0
    backwards: int = 0
    gathers: dict[str, str] = field(default_factory=dict)
    was_cut: bool = False

    @property
    def trains(self) -> bool:
        """Whether gradients were computed from its batches."""
        return self.backwards > 0


class Observed:
    """Facts of one rank.

    Attributes:
        accelerators: those that the script made.
        steps: of all optimizers together, once for those that step with the same batch.
        steps_of: each optimizer, by identity.
        backwards: backward passes.
        passes: over loaders, in the order in which they began.
        accumulates: whether ``accumulate`` or ``no_sync`` was entered.
        saved: names of the methods that saved something.
        has_ended: whether everything has been recorded.
    """

    def __init__(self, task: Task, journal: Journal, rank: int = 0) -> None:
        self.task, self.journal, self.rank = task, journal, rank
        self.accelerators: list[Any] = []
        self.steps_of: dict[int, int] = {}
        self.backwards = 0
        self.passes: list[Pass] = []
        self.reading: list[Pass] = []
        self.accumulates = self.averages_weights = self.has_ended = False
        self.saved: list[str] = []
        self._found: set[tuple[str, str]] = set()

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer that stepped most often."""
        return max(self.steps_of.values(), default=0)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.task.processes > 1

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step, by the latest ``Accelerator``."""
        return int(self.accelerators[-1].gradient_accumulation_steps) if self.accelerators else 1

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are those of a scaled loss, as in fp16."""
        return bool(self.accelerators) and self.accelerators[-1].scaler is not None

    @property
    def steps_in_backward(self) -> bool:
        """Whether engines of another library step, on gradients and parameters of their own."""
        return any(getattr(one, "deepspeed_plugin", None) is not None for one in self.accelerators)

    @property
    def has_stages(self) -> bool:
        """Whether models are in stages, which only ``train_batch`` computes with, and other ranks have others."""
        return any(one._session.strategy.trains_batches for one in self.accelerators)

    def prepared(self, kind: str) -> list[Any]:
        """The prepared objects of a kind: ``models``, ``optimizers``, ``dataloaders`` or ``schedulers``."""
        return [item for accelerator in self.accelerators for item in getattr(accelerator, f"_{kind}")]

    def is_prepared_optimizer(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` is a prepared one, or is wrapped by one."""
        return any(optimizer is known or optimizer is known.optimizer for known in self.prepared("optimizers"))

    def is_prepared_scheduler(self, scheduler: Any) -> bool:
        """Whether ``scheduler`` is a prepared one, or is wrapped by one."""
        return any(scheduler is known or scheduler is known.scheduler for known in self.prepared("schedulers"))

    def end(self, how: str) -> None:
        """Records how the run ended, and its progress."""
        # Programs without an Accelerator may share work by a PartialState, as those in JAX, TensorFlow and Keras do.
        knows_ranks = bool(self.accelerators) or current.session is not None
        self.journal.write("end", how=how, steps=self.steps, backwards=self.backwards, has_accelerator=knows_ranks)

    def find(self, level: str, code: str, what: str, advice: str = "", where: str | None = None) -> None:
        """Records a finding, once for each place; ``where`` is by default the running line of the user's code."""
        place = here() if where is None else where
        if (code, place) not in self._found:
            self._found.add((code, place))
            finding = Finding(level, code, what, place, advice)
            self.journal.write("finding", **finding.as_data())
