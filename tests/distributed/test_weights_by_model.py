"""Weighted backward passes of two models in one and two real processes, compared with one on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

MICRO_BATCHES, STEPS = 2, 3
LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)  # rows of the first model's micro-batches, in order


def rows(first: bool, part: int) -> tuple[Any, Any]:
    """Inputs and targets of one micro-batch of one process; the second model has twice as many rows, and one more."""
    import torch

    generator = torch.Generator().manual_seed(100 * part + first)
    count = LENGTHS[part] if first else 2 * LENGTHS[-1 - part] + 1
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


def models() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)


def loss_of(model: Any, batch: tuple[Any, Any]) -> Any:
    return (model(batch[0]) - batch[1]).square().sum()


def parts_of(step: int, rank: int, world_size: int) -> list[int]:
    """The micro-batches of a step, of all processes together 4, that ``rank`` works on."""
    share = 4 // world_size
    return [4 * step + rank * share + number for number in range(share)]


def trained(backend: str | None, together: bool) -> tuple[list[float], list[float]]:
    """The values of two models after some steps; and the gradients of a third, which no loss depends on."""
    import torch

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    own = Accelerator(cpu=True, kwargs_handlers=handlers)
    own.gradient_accumulation_steps = 4 // own.num_processes
    plain = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in plain[:2]]
    first, second, other, *optimizers = own.prepare(*plain, *optimizers)
    with own.no_sync(other):
        other(torch.ones(1, 3)).sum().backward()
    for step in range(STEPS):
        for part in parts_of(step, own.process_index, own.num_processes):
            with own.accumulate(first, second):
                batches = rows(True, part), rows(False, part)
                losses = loss_of(first, batches[0]), loss_of(second, batches[1])
                if together:
                    own.backward(losses[0] + losses[1], weight=len(batches[0][0]))
                else:
                    own.backward(losses[0], weight=len(batches[0][0]))
                    own.backward(losses[1], weight=len(batches[1][0]))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    values = [value for model in plain[:2] for weight in model.parameters() for value in weight.flatten().tolist()]
    return values, [value for weight in plain[2].parameters() for value in weight.grad.flatten().tolist()]


def trained_alone(together: bool) -> list[float]:
    """The same in plain torch on one batch of all rows for each step."""
    import torch

    plain = models()[:2]
    for step in range(STEPS):
        parts = parts_of(step, 0, 1)
        for first, model in zip((True, False), plain, strict=True):
            batches = [rows(first, part) for part in parts]
            whole = tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))
            count = sum(len(rows(first or together, part)[0]) for part in parts)
            gradients = torch.autograd.grad(loss_of(model, whole) / count, list(model.parameters()))
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.data -= 0.05 * gradient
    return [value for model in plain for weight in model.parameters() for value in weight.flatten().tolist()]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize(("processes", "backend"), [(1, None), (2, None), (2, "gloo")])
def test_two_models_are_divided_by_the_weights_of_their_own_passes(
    processes: int, backend: str | None, together: bool
) -> None:
    (expected,) = run_processes(trained_alone, 1, together)
    for values, untouched in run_processes(trained, processes, backend, together):
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert untouched == [1.0] * 8


def in_turns(backend: str | None) -> list[float]:
    """The gradients of two models of which each has a pass, and one steps between them, as in scripts of GANs."""
    import torch

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    own = Accelerator(cpu=True, kwargs_handlers=handlers)
    critic, generator = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    for model in (critic, generator):
        torch.nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (critic, generator)]
    critic, generator, critics, generators = own.prepare(critic, generator, *optimizers)
    seen = []
    rank = own.process_index
    for _ in range(2):
        critics.zero_grad()
        own.backward(critic(torch.full((3, 1), rank + 1.0)).sum(), weight=3 + rank)
        seen.append(own.unwrap_model(critic).weight.grad.item())
        critics.step()
        generators.zero_grad()
        own.backward(critic(generator(torch.ones(2, 1))).sum(), weight=2)
        seen.append(own.unwrap_model(generator).weight.grad.item())
        generators.step()
    return seen


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_models_that_step_in_turns_are_each_divided_by_their_last_pass(backend: str | None) -> None:
    # In one process: rows of 1, 1, 1 and 2, 2, 2 with weights of 3 and 4; then four rows of 1 with a weight of 4.
    expected = [(3 * 1 + 3 * 2) / 7, 4 / 4] * 2
    for seen in run_processes(in_turns, 2, backend):
        assert seen == pytest.approx(expected)


def rows_of(rank: int, part: int) -> Any:
    """Inputs of a micro-batch, of 1 to 4 rows."""
    import torch

    return torch.randn(1 + rank + 2 * part, 3, generator=torch.Generator().manual_seed(10 * rank + part))


def two_layers() -> Any:
    """A model that can leave its second layer out."""
    import torch

    class TwoLayers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)

        def forward(self, batch: torch.Tensor, whole: bool) -> torch.Tensor:
            return self.second(self.first(batch)) if whole else self.first(batch)

    torch.manual_seed(0)
    return TwoLayers()


def sum_of(model: Any, rank: int, part: int) -> Any:
    """The sum of squares of a micro-batch; the second part of rank 1 leaves the second layer out."""
    return model(rows_of(rank, part), (rank, part) != (1, 1)).square().sum()


def averaged_in_each_pass() -> list[float]:
    """The gradients of a step in two passes that both average, of which the second leaves a layer out on one rank."""
    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import GradientAccumulationPlugin

    own = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=True))
    plain = two_layers()
    model = own.prepare(plain)
    for part in range(2):
        with own.accumulate(model):
            loss = sum_of(model, own.process_index, part)
            own.backward(loss, weight=len(rows_of(own.process_index, part)))
    return [value for weight in plain.parameters() for value in weight.grad.flatten().tolist()]


def averaged_at_once() -> list[float]:
    """The same in plain torch in one pass over all rows."""
    model = two_layers()
    parts = [(rank, part) for rank in range(2) for part in range(2)]
    (sum(sum_of(model, *one) for one in parts) / sum(len(rows_of(*one)) for one in parts)).backward()
    return [value for weight in model.parameters() for value in weight.grad.flatten().tolist()]


def test_averages_of_earlier_passes_are_divided_by_all_weights_where_a_later_pass_leaves_a_layer_out() -> None:
    (expected,) = run_processes(averaged_at_once, 1)
    for gradients in run_processes(averaged_in_each_pass, 2):
        assert gradients == pytest.approx(expected, rel=1e-4, abs=1e-6)
