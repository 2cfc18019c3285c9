"""Weights that several stages have, such as embeddings that are also the head: copies with one gradient.

Each rank has a copy, and the gradients of a step are summed over them, so that equal copies stay equal (Shoeybi et al.,
Megatron-LM, 2019; Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.parallel.pipeline.cut import Tie
from accelerate_cpp.parallel.pipeline.peers import global_rank

__all__ = ["TiedWeights"]


@dataclass(frozen=True)
class _Shared:
    """A weight that this rank has, too: where here, and who has it (ranks in the group, in order)."""

    stages: list[nn.Module]
    names: list[str]
    ranks: list[int]

    def parameters(self) -> list[nn.Parameter]:
        """Usually one: stages of one rank share it."""
        found = [stage.get_parameter(name) for stage, name in zip(self.stages, self.names, strict=True)]
        return list({id(parameter): parameter for parameter in found}.values())


class TiedWeights:
    """The weights that this rank and others have.

    Parameters are looked up in the stages each time: what shards or moves a stage may replace them. Those that are
    sharded have to be sharded alike on all ranks of the group.

    Args:
        ties: in the same order on all ranks of the group.
        ranks: for each stage its rank in the group.
        stages: those of this rank by their number.
        group: the ranks of the pipeline.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        ranks: Sequence[int],
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._shared: list[_Shared] = []
        for tie in ties:
            owners = sorted({ranks[number] for number in tie.names})
            mine = [number for number in sorted(tie.names) if number in stages]
            if len(owners) > 1 and mine:
                names = [tie.names[number] for number in mine]
                self._shared.append(_Shared([stages[number] for number in mine], names, owners))
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def copies(self) -> frozenset[str]:
        """The names here of weights that an earlier rank of the group has, too.

        What is summed over all parameters of the model, such as a norm, counts them there only.
        """
        return frozenset(name for one in self._shared if one.ranks[0] != self._rank for name in one.names)

    @torch.no_grad()
    def equalise(self) -> None:
        """Gives the copies the values of the first rank that has one. Called by all ranks of the group."""
        for one in self._shared:
            for parameter in one.parameters()[:1]:
                if not parameter.is_meta:
                    self._from_first(local_part(parameter).detach(), one.ranks)

    def begin(self) -> None:
        """Puts away the gradients of earlier steps, which are summed already."""
        self._before = []
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._before.append((parameter, parameter.grad))
                parameter.grad = None

    @torch.no_grad()
    def end(self) -> None:
        """Sums the gradients since :meth:`begin`, and adds those of earlier steps. Called by all ranks of the group."""
        for one in self._shared:
            first, *others = one.parameters()
            if not first.requires_grad:
                continue
            if first.grad is None:
                first.grad = torch.zeros_like(first)
            for other in others:  # of this rank, replaced by different parameters
                if other.grad is not None:
                    first.grad.add_(other.grad)
            self._sum(local_part(first.grad).detach(), one.ranks)
            for other in others:
                other.grad = first.grad.clone()
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._before = []

    def abandon(self) -> None:
        """Restores the gradients of earlier steps after a step that failed."""
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    def _parameters(self) -> list[nn.Parameter]:
        found = (parameter for one in self._shared for parameter in one.parameters())
        return list({id(parameter): parameter for parameter in found}.values())

    def _sum(self, mine: Tensor, ranks: Sequence[int]) -> None:
        """The first rank adds in the order of ranks, so that all get the same bits."""
        value = mine.contiguous()
        if self._rank == ranks[0]:
            arrived = torch.empty_like(value)
            for rank in ranks[1:]:
                dist.recv(arrived, global_rank(rank, self._group), self._group)
                value.add_(arrived)
        else:
            dist.send(value, global_rank(ranks[0], self._group), self._group)
        self._from_first(value, ranks)
        if value is not mine:
            mine.copy_(value)

    def _from_first(self, mine: Tensor, ranks: Sequence[int]) -> None:
        value = mine.contiguous()
        if self._rank == ranks[0]:
            for rank in ranks[1:]:
                dist.send(value, global_rank(rank, self._group), self._group)
            return
        dist.recv(value, global_rank(ranks[0], self._group), self._group)
        if value is not mine:
            mine.copy_(value)
