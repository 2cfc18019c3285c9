"""Checks of pipeline parallelism, alone and together with the other kinds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from features_common import INPUTS, OUTPUTS, Ranks, batch, check, optimizer_for, whole

CPU = torch.device("cpu")
LAYERS = 4
MICROBATCHES = 4
STEPS = 2


class Layer(nn.Module):
    """A pair of linear layers for tensor parallelism to divide. The result is no view, which zero-bubble needs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 8)
        self.down = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(inputs))))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    widths = [INPUTS, *[5] * (LAYERS - 1), OUTPUTS]
    return nn.Sequential(*(Layer(inputs, outputs) for inputs, outputs in pairwise(widths)))


def reference() -> tuple[nn.Sequential, list[float]]:
    """Weights and losses of the training in one process."""
    module, losses = layers(), []
    optimizer = optimizer_for(module)
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return module, losses


def in_one_piece(count: int) -> dict[int, int]:
    """Consecutive layers on consecutive ranks: the rank of each stage."""
    return {stage: stage for stage in range(count)}


def round_robin(count: int) -> dict[int, int]:
    return {stage: stage % count for stage in range(2 * count)}


def there_and_back(count: int) -> dict[int, int]:
    """A V: the first rank has the first and the last stage."""
    return {stage: min(stage, 2 * count - 1 - stage) for stage in range(2 * count)}


class Pipeline:
    """This rank's stages of the layers, their schedule, and the training of them."""

    def __init__(self, schedule: Any, placement: dict[int, int], group: dist.ProcessGroup, prepare: Any = None) -> None:
        self.mine = [stage for stage, rank in placement.items() if rank == group.rank()]
        self.last = len(placement) - 1
        each = LAYERS // len(placement)
        self.modules = [layers()[stage * each : (stage + 1) * each] for stage in self.mine]
        self.expected = [range(stage * each, (stage + 1) * each) for stage in self.mine]
        for module in self.modules if prepare else []:
            prepare(module)
        stages = [
            PipelineStage(module, stage, len(placement), CPU, group=group)
            for stage, module in zip(self.mine, self.modules, strict=True)
        ]
        one = issubclass(schedule, schedules.PipelineScheduleSingle)
        self.schedule = schedule(stages[0] if one else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def train(self, part: int = 0, parts: int = 1) -> list[float]:
        """The losses, where the last stage is."""
        optimizers = [optimizer_for(module) for module in self.modules]
        means = []
        for step in range(STEPS):
            inputs, targets = batch(step, part, parts)
            losses: list[Tensor] | None = [] if self.last in self.mine else None
            arguments = (inputs,) if 0 in self.mine else ()
            self.schedule.step(*arguments, target=targets if losses is not None else None, losses=losses)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if losses:
                means.append(torch.stack(losses).mean().item())
        return means

    def check(self, expected: nn.Sequential) -> None:
        for module, indices in zip(self.modules, self.expected, strict=True):
            theirs = [parameter for index in indices for parameter in expected[index].parameters()]
            for own, other in zip(module.parameters(), theirs, strict=True):
                check(whole(own.detach()), other.detach(), 1e-5)


def trains_like_one_process(schedule: Any, placement: dict[int, int]) -> None:
    expected, losses = reference()
    pipe = Pipeline(schedule, placement, dist.group.WORLD)
    means = pipe.train()
    pipe.check(expected)
    if means:
        check(means, losses, 1e-5)


def gpipe(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleGPipe, in_one_piece(ranks.size))


def one_forward_one_backward(ranks: Ranks) -> None:
    trains_like_one_process(schedules.Schedule1F1B, in_one_piece(ranks.size))


def looped_breadth_first(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleLoopedBFS, round_robin(ranks.size))


def interleaved(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleInterleaved1F1B, round_robin(ranks.size))


def interleaved_zero_bubble(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleInterleavedZeroBubble, round_robin(ranks.size))


def zero_bubble_v(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleZBVZeroBubble, there_and_back(ranks.size))


def dual_pipe_v(ranks: Ranks) -> None:
    trains_like_one_process(schedules.ScheduleDualPipeV, there_and_back(ranks.size))


def four_stages(ranks: Ranks) -> None:
    trains_like_one_process(schedules.Schedule1F1B, in_one_piece(ranks.size))


def evaluation(ranks: Ranks) -> None:
    """Forward alone; the outputs are on the last rank."""
    pipe = Pipeline(schedules.ScheduleGPipe, in_one_piece(ranks.size), dist.group.WORLD)
    inputs, targets = batch(0)
    last = ranks.rank == ranks.size - 1
    result = pipe.schedule.eval(*((inputs,) if ranks.rank == 0 else ()), target=targets if last else None)
    if last:
        check(result.detach(), layers()(inputs).detach(), 1e-6)


def traced(ranks: Ranks) -> None:
    """Stages cut from a model by torch.export."""
    expected, _ = reference()
    microbatch = batch(0)[0].chunk(MICROBATCHES)[0]
    pipe = pipeline(layers(), (microbatch,), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(ranks.rank, CPU, dist.group.WORLD)
    schedule = schedules.ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = optimizer_for(stage.submod)
    for step in range(STEPS):
        inputs, targets = batch(step)
        schedule.step(*((inputs,) if ranks.rank == 0 else ()), target=targets if ranks.rank else None)
        optimizer.step()
        optimizer.zero_grad()
    for name, own in stage.submod.named_parameters():
        check(own.detach(), dict(expected.named_parameters())[name].detach(), 1e-5)


def together(ranks: Ranks, schedule: Any, placement: dict[int, int]) -> None:
    """Two ranks for each of the three kinds."""
    mesh = ranks.mesh(2, 2, 2, names=("pp", "dp", "tp"))

    def prepare(module: nn.Sequential) -> None:
        for layer in module:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)

    expected, losses = reference()
    pipe = Pipeline(schedule, placement, mesh.get_group("pp"), prepare)
    means = pipe.train(mesh.get_local_rank("dp"), 2)
    pipe.check(expected)
    if means:
        whole_losses = torch.tensor(means)
        dist.all_reduce(whole_losses, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        check(whole_losses, torch.tensor(losses), 1e-5)


def three_kinds(ranks: Ranks) -> None:
    together(ranks, schedules.Schedule1F1B, in_one_piece(2))


def three_kinds_interleaved(ranks: Ranks) -> None:
    together(ranks, schedules.ScheduleInterleaved1F1B, round_robin(2))


def three_kinds_zero_bubble(ranks: Ranks) -> None:
    together(ranks, schedules.ScheduleZBVZeroBubble, there_and_back(2))
