"""What a user chooses for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelineOptions"]


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut, and in which order its parts compute.

    Attributes:
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` (two stages on each rank) or ``"zero_bubble"`` (two stages
            on each rank; backward passes for weights fill the time in which ranks would wait).
        micro_batches: into how many parts a batch is divided; by default two for each rank.
        split_points: names of the modules with which the second to the last stage begin. By default stages are about
            equally expensive.
    """

    schedule: str = "1f1b"
    micro_batches: int | None = None
    split_points: tuple[str, ...] | None = None
