"""Two Accelerators with a model each in two real processes, compared with one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

ROUNDS, STEPS, ROWS = 6, 2, 4  # micro-batches, those of a step, and rows of a global one


def models() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    critic = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return generator, critic


def batches(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    """Noise and real samples of each micro-batch: this rank's rows."""
    import torch

    torch.manual_seed(1)
    whole = [(torch.randn(ROWS, 2), torch.randn(ROWS, 3)) for _ in range(ROUNDS)]
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return [(noise[rows], real[rows]) for noise, real in whole]


def loss_of_critic(generator: Any, critic: Any, noise: Any, real: Any) -> Any:
    return critic(generator(noise).detach()).square().mean() + (critic(real) - 1).square().mean()


def loss_of_generator(generator: Any, critic: Any, noise: Any) -> Any:
    return (critic(generator(noise)) - 1).square().mean()


def weights_of(*trained: Any) -> list[float]:
    return [value for model in trained for weight in model.parameters() for value in weight.flatten().tolist()]


def gan(backend: str | None) -> list[float]:
    import torch

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    for_generator, for_critic = (
        Accelerator(cpu=True, gradient_accumulation_steps=STEPS, kwargs_handlers=handlers) for _ in range(2)
    )
    plain = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in plain]
    generator, generators = for_generator.prepare(plain[0], optimizers[0])
    critic, critics = for_critic.prepare(plain[1], optimizers[1])
    for noise, real in batches(for_critic.process_index, for_critic.num_processes):
        with for_critic.accumulate(critic):
            for_critic.backward(loss_of_critic(generator, critic, noise, real))
            critics.step()
            critics.zero_grad()
        critic.requires_grad_(False)
        with for_generator.accumulate(generator):
            for_generator.backward(loss_of_generator(generator, critic, noise))
            generators.step()
            generators.zero_grad()
        critic.requires_grad_(True)
    return weights_of(*plain)


def gan_alone() -> list[float]:
    """The same in plain torch on all rows."""
    import torch

    generator, critic = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (generator, critic)]
    for index, (noise, real) in enumerate(batches(0, 1), 1):
        losses = {
            critic: (lambda at=(noise, real): loss_of_critic(generator, critic, *at), optimizers[1]),
            generator: (lambda at=noise: loss_of_generator(generator, critic, at), optimizers[0]),
        }
        for model, (loss, optimizer) in losses.items():
            gradients = torch.autograd.grad(loss() / STEPS, list(model.parameters()))
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            if index % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(generator, critic)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_two_models_with_an_accelerator_each_train_as_on_one_process(backend: str | None) -> None:
    one, other = run_processes(gan, 2, backend)
    (expected,) = run_processes(gan_alone, 1)
    assert one == other == pytest.approx(expected, rel=1e-4, abs=1e-6)
