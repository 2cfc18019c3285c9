"""What :class:`DataParallel` does for ranks that run out of batches before the others (torch's ``Join``).

In every step all ranks first agree on three numbers: whether gradients are averaged, whether buffers are broadcast, and
the first rank that still trains, whose buffers count. A rank without batches then takes part in both, with nothing of
its own: the sums over the ranks are divided by the weights of those that have batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from accelerate_cpp.parallel.data_parallel import DataParallel


def agree(
    model: DataParallel, trains: bool, averages: bool = False, broadcasts: bool = False
) -> tuple[bool, bool, int]:
    """Whether this step averages, whether it broadcasts buffers, and the first rank that trains. Collective."""
    communicator = model.communicator
    place = communicator.size - communicator.rank if trains else 0
    numbers = torch.tensor([int(averages), int(broadcasts), place])
    communicator.all_reduce(numbers, dist.ReduceOp.MAX, model.timeout)
    some_average, some_broadcast, first = numbers.tolist()
    return bool(some_average), bool(some_broadcast), communicator.size - first


class UnevenInputs(JoinHook):
    """The part of one model in the loop of a rank that has no batches any more."""

    def __init__(self, model: DataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Mirrors one training step of the ranks that have batches."""
        averages, broadcasts, source = agree(self._model, trains=False)
        if broadcasts:
            self._model.broadcast_buffers_from(source)
        if averages:
            self._model.take_part_without_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes over the model of a rank that trained to the end."""
        _, _, source = agree(self._model, trains=is_last_joiner)
        self._model.take_over_from(source)
