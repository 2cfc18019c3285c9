"""The ranks of a group as processes."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["global_rank"]


def global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    """The rank among all processes of ``rank`` in ``group``, which is all processes if there is none."""
    return rank if group is None else dist.get_global_rank(group, rank)
