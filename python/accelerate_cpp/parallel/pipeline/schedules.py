"""The orders in which the ranks of a pipeline compute: what they need, and how long they leave ranks idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

__all__ = ["SCHEDULES", "Schedule", "bubble_fraction", "schedule_named"]


@dataclass(frozen=True)
class Schedule:
    """One order of forward and backward passes.

    Attributes:
        stages_per_rank: how many stages each rank has.
        folded: stages go down the ranks and back up, so that the first rank has the first and the last one. Otherwise
            they are dealt out in turn.
        class_name: its class in ``torch.distributed.pipelining``.
    """

    name: str
    stages_per_rank: int
    folded: bool
    class_name: str

    def ranks_of_stages(self, ranks: int) -> list[int]:
        """For each stage its rank in the pipeline's group."""
        there = list(range(ranks))
        return there + there[::-1] if self.folded else there * self.stages_per_rank

    def check(self, ranks: int, micro_batches: int) -> None:
        """Raises InvalidArgument if a batch cannot be computed in ``micro_batches`` parts on that many ranks."""
        if micro_batches < 1:
            raise InvalidArgument(f"pipeline: micro_batches={micro_batches}; expected at least 1")
        if self.name == "1f1b" and micro_batches < ranks:
            raise InvalidArgument(
                f"pipeline: schedule '1f1b' on {ranks} ranks needs at least {ranks} micro-batches, but micro_batches="
                f"{micro_batches}; choose {ranks} or more, or schedule='gpipe'"
            )
        rounds = max(1, micro_batches // ranks)
        if self.name == "interleaved" and micro_batches % rounds:
            lower = micro_batches // ranks * ranks
            raise InvalidArgument(
                f"pipeline: schedule 'interleaved' on {ranks} ranks computes {micro_batches} micro-batches in {rounds} "
                f"rounds, which do not divide them; choose micro_batches={lower} or {lower + ranks}"
            )

    def build(self, stages: Sequence[PipelineStage], micro_batches: int, loss_fn: Callable[..., Any]) -> Any:
        """Torch's schedule for the stages of this rank; it adds up the gradients of parts.

        Raises:
            InvalidArgument: it would compute wrong gradients for these stages.
        """
        from torch.distributed import pipelining

        if self.folded and any(_shards_within(stage.submod) for stage in stages):
            raise InvalidArgument(
                f"pipeline: with schedule {self.name!r} torch loses gradients of modules that are sharded within a "
                "stage; shard stages as wholes (fully_shard(stage) alone), or choose schedule='interleaved'"
            )
        given = stages[0] if self.stages_per_rank == 1 else list(stages)
        return getattr(pipelining, self.class_name)(given, micro_batches, loss_fn=loss_fn, scale_grads=False)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", 1, False, "ScheduleGPipe"),
        Schedule("1f1b", 1, False, "Schedule1F1B"),
        Schedule("interleaved", 2, False, "ScheduleInterleaved1F1B"),
        Schedule("zero_bubble", 2, True, "ScheduleZBVZeroBubble"),
    )
}


def _shards_within(stage: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module inside of a stage."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in stage.modules() if module is not stage)


def schedule_named(name: str, stages_per_rank: int | None = None) -> Schedule:
    """The schedule ``name``; if it is ``"interleaved"``, with that many stages on each rank.

    Raises:
        InvalidArgument: ``name`` is none of ``SCHEDULES``, or ranks cannot have that many stages in it.
    """
    if name not in SCHEDULES:
        raise InvalidArgument(f"pipeline: schedule={name!r}; expected one of {', '.join(map(repr, SCHEDULES))}")
    schedule = SCHEDULES[name]
    if stages_per_rank in (None, schedule.stages_per_rank):
        return schedule
    if name != "interleaved" or stages_per_rank < 2:
        raise InvalidArgument(
            f"pipeline: stages_per_process={stages_per_rank} with schedule {name!r}, which has "
            f"{schedule.stages_per_rank}{' or more' if name == 'interleaved' else ''}; leave it out, or choose "
            "schedule='interleaved' with 2 or more"
        )
    return replace(schedule, stages_per_rank=stages_per_rank)


def bubble_fraction(schedule: str, stages: int, micro_batches: int, stages_per_rank: int | None = None) -> float:
    """The share of the time of a step in which a rank is idle, from 0 to 1.

    Stages are taken to be equal, a backward pass to take twice as long as a forward pass (equally long for inputs and
    for weights), and sending to take no time. With p ranks, v stages on each, and m micro-batches:

    - ``gpipe``: (p - 1) / (m + p - 1) (Huang et al., GPipe, 2019); ``1f1b`` the same, with activations of at most p
      micro-batches in memory instead of m (Narayanan et al., PipeDream, 2019).
    - ``interleaved``: (p - 1) / (v m + p - 1) (Narayanan et al., Efficient large-scale language model training on GPU
      clusters using Megatron-LM, 2021). With fewer than p micro-batches, ranks also wait for (v - 1)
      (p - m) more.
    - ``zero_bubble``: that of ZB-V (Qi et al., Zero bubble pipeline parallelism, 2023, section 6): no rank waits
      between its first and its last operation, but ranks begin one after the other, and the optimizer waits for all:
      (p - 1) / (6 m + p - 1). It needs 2 p - 1 micro-batches; with fewer, ranks wait.

    Args:
        stages: in total.
        stages_per_rank: with ``"interleaved"``; ``None`` means 2.

    Raises:
        InvalidArgument: ``schedule`` is none, or the ranks cannot have equally many of the stages.
    """
    chosen = schedule_named(schedule, stages_per_rank)
    each, m = chosen.stages_per_rank, micro_batches
    if stages < 1 or stages % each:
        raise InvalidArgument(f"bubble_fraction: stages={stages}; expected a multiple of {each} for {schedule!r}")
    chosen.check(stages // each, m)
    p = stages // each
    if chosen.folded:
        idle, busy = max(p - 1, 2 * (2 * p - 1 - m)), 3 * each * m
    else:
        idle, busy = p - 1 + (each - 1) * max(0, p - m), each * m
    return idle / (busy + idle)
