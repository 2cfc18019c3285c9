"""Which ranks trained to the end where some ran out of batches before the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig


def leave(other: Joinable) -> None:
    """Ends what torch's ``Join`` has begun for ``other``, which would go on agreeing with the other ranks."""
    other._join_config = _JoinConfig.construct_disabled_join_config()


class LastToTrain(Joinable, JoinHook):
    """Takes part in torch's ``Join`` beside ``other``, and knows afterwards who was the last."""

    def __init__(self, other: Joinable) -> None:
        super().__init__()
        self._other = other
        self._is_last = True

    @property
    def join_device(self) -> torch.device:
        """That of the others."""
        return self._other.join_device

    @property
    def join_process_group(self) -> Any:
        """That of the others."""
        return self._other.join_process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join``."""
        return self

    def post_hook(self, is_last_joiner: bool) -> None:
        """Notes whether this rank trained to the end."""
        self._is_last = is_last_joiner

    def find(self) -> tuple[int, bool] | None:
        """The first rank that trained to the end, and whether this one did; ``None`` if all did. Collective."""
        group = self.join_process_group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        numbers = torch.tensor([size - rank if self._is_last else 0, int(not self._is_last)], device=self.join_device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
        place, some_left = numbers.tolist()
        return (size - place, self._is_last) if some_left else None
