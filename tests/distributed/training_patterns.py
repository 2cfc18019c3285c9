"""Ways of training, each a scenario, which our wrapper and torch's must agree on; run by ``test_model_zoo.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from scenarios import Ranks, Scenarios, compare_passes, compare_training, same_gradients, same_state

# Torch, and the models with it, is imported inside the functions: the process that collects the tests needs none of it.

PATTERNS, SLOW_PATTERNS = Scenarios(), Scenarios()


def zoo() -> Any:
    """The models and what they are trained on."""
    import model_zoo

    return model_zoo


def rows(ranks: Ranks) -> Callable[[Any, int], Any]:
    """A loss: classification of vectors."""
    loss: Callable[[Any, int], Any] = zoo().classification(ranks, lambda step: ranks.batch(step, 6, 8))
    return loss


def pictures(ranks: Ranks) -> Callable[[Any, int], Any]:
    """A loss: classification of images."""
    loss: Callable[[Any, int], Any] = zoo().classification(ranks, partial(zoo().images, ranks))
    return loss


def three_micro_steps(loss: Callable[[Any, int], Any]) -> Callable[[Any, int], Iterator[None]]:
    """Passes of which two leave their gradients local."""

    def passes(model: Any, step: int) -> Iterator[None]:
        for part in range(3):
            with model.no_sync() if part < 2 else nullcontext():
                loss(model, 10 * step + part).backward()
            yield

    return passes


@PATTERNS.add
def accumulation_over_three_micro_steps(ranks: Ranks) -> None:
    compare_passes(*ranks.pair(zoo().Decoder), three_micro_steps(zoo().prediction(ranks)))


@PATTERNS.add
def accumulation_over_three_micro_steps_with_batch_norm(ranks: Ranks) -> None:
    compare_passes(*ranks.pair(zoo().convolutions_with_batch_norm), three_micro_steps(pictures(ranks)))


@PATTERNS.add
def accumulation_over_three_micro_steps_with_statistics_that_gradients_depend_on(ranks: Ranks) -> None:
    compare_passes(*ranks.pair(zoo().RunningScale), three_micro_steps(rows(ranks)))


@PATTERNS.add
def accumulation_in_which_some_experts_are_used_only_by_some_ranks_and_only_locally(ranks: Ranks) -> None:
    loss = rows(ranks)

    def passes(model: Any, step: int) -> Iterator[None]:
        for part, used in enumerate([[0, 2], [0, 1] if ranks.rank == 0 else [0], [0]]):
            with model.no_sync() if part < 2 else nullcontext():
                loss(partial(model, used=used), 10 * step + part).backward()
            yield

    ours, theirs = ranks.pair(zoo().MixtureOfExperts, find_unused_parameters=True)
    compare_passes(ours, theirs, passes)
    assert ours.module.experts[1][0].weight.grad.abs().sum() > 0


@PATTERNS.add
def accumulation_of_sparse_gradients(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 6))

    def passes(model: Any, step: int) -> Iterator[None]:
        for part in range(4):
            with model.no_sync() if part % 2 == 0 else nullcontext():
                loss(model, 10 * step + part).backward()
            yield

    compare_passes(*ranks.pair(zoo().word_classifier), passes, momentum=0)


@PATTERNS.add
def a_model_with_batch_norm_that_is_called_twice_before_each_backward_pass(ranks: Ranks) -> None:
    def loss(model: Any, step: int) -> Any:
        return (model(zoo().images(ranks, step)) - model(zoo().images(ranks, step + 50))).square().mean()

    compare_training(*ranks.pair(zoo().convolutions_with_batch_norm), loss)


@PATTERNS.add
def evaluation_between_steps_with_batch_norm(ranks: Ranks) -> None:
    import torch

    results: list[Any] = []

    def loss(model: Any, step: int) -> Any:
        with torch.no_grad():
            results.append(model.eval()(zoo().images(ranks, step + 50)))
        return pictures(ranks)(model.train(), step)

    compare_training(*ranks.pair(zoo().convolutions_with_batch_norm), loss)
    torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-6)


def two_losses(ranks: Ranks, model: Any, step: int) -> tuple[Any, Any]:
    """Of one forward pass. Each has a head of its own, and both share the body."""
    results = model(ranks.batch(step, 6, 8))
    return results["classes"].logsumexp(1).mean(), results["value"].square().mean()


@PATTERNS.add
def two_losses_of_one_forward_pass(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(zoo().TwoHeads)

    def loss(model: Any, step: int) -> Any:
        first, second = two_losses(ranks, model, step)
        if model is theirs:  # It leaves a second backward pass local: only their sum can be compared.
            return first + second
        first.backward(retain_graph=True)
        return second

    compare_training(ours, theirs, loss)


@PATTERNS.add
def two_losses_of_one_forward_pass_of_which_the_first_stays_local(ranks: Ranks) -> None:
    def passes(model: Any, step: int) -> Iterator[None]:
        with model.no_sync():
            first, second = two_losses(ranks, model, step)
        first.backward(retain_graph=True)
        yield
        model.reducer.prepare_for_backward([])
        (first + second).backward()
        yield

    compare_passes(*ranks.pair(zoo().TwoHeads), passes)


@PATTERNS.add
def a_generator_and_its_critic(ranks: Ranks) -> None:
    import torch
    from torch.nn.functional import softplus

    def turns(generator: Any, critic: Any, step: int) -> Iterator[None]:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, critic)]
        critic.zero_grad()
        softplus(critic(ranks.batch(step, 4, 1, 8, 8))).mean().backward()
        yield
        generated = generator(ranks.batch(step + 50, 4, 4))
        softplus(-critic(generated.detach())).mean().backward()
        yield
        optimizers[1].step()
        generator.zero_grad()
        softplus(critic(generated)).mean().backward()
        yield
        optimizers[0].step()

    generators, critics = ranks.pair(zoo().generator), ranks.pair(zoo().critic)
    for step in range(4):
        both = [turns(*models, step) for models in zip(generators, critics, strict=True)]
        for _ in zip(*both, strict=True):
            same_gradients(*generators)
            same_gradients(*critics)
    same_state(*generators)
    same_state(*critics)


@PATTERNS.add
def a_critic_with_a_gradient_penalty(ranks: Ranks) -> None:
    import torch

    def loss(model: Any, step: int) -> Any:
        data = ranks.batch(step, 4, 1, 8, 8).requires_grad_()
        result = model(data)
        (gradient,) = torch.autograd.grad(result.sum(), data, create_graph=True)
        return result.mean() + (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    compare_training(*ranks.pair(zoo().critic), loss)


@PATTERNS.add
def autocast_to_bfloat16(ranks: Ranks) -> None:
    import torch

    def loss(model: Any, step: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return zoo().prediction(ranks)(model, step)

    compare_training(*ranks.pair(zoo().Decoder), loss)


@PATTERNS.add
def two_models_that_share_an_embedding(ranks: Ranks) -> None:
    import torch
    from torch import nn

    def both(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(ranks.rank)
        shared = nn.Embedding(zoo().WORDS, 8)
        return nn.ModuleList([wrap(nn.Sequential(shared, nn.Linear(8, size))) for size in (5, 3)])

    def passes(models: Any, step: int) -> Iterator[None]:
        data = zoo().words(ranks, step, 6, 4)
        models[0](data).square().mean().backward()
        yield
        models[1](data).sin().mean().backward()
        yield
        (models[0](data).sin().mean() + models[1](data).square().mean()).backward()
        yield

    compare_passes(both(ranks.wrap), both(nn.parallel.DistributedDataParallel), passes, steps=10)


@PATTERNS.add
def a_model_that_is_wrapped_again_while_its_first_wrapper_lives(ranks: Ranks) -> None:
    import torch

    first = ranks.pair(zoo().low_rank_adaptation)
    again = ranks.wrap(first[0].module), torch.nn.parallel.DistributedDataParallel(first[1].module)
    compare_training(*again, rows(ranks), steps=20)
    compare_training(*first, rows(ranks), steps=20)


@PATTERNS.add
def a_model_that_was_compiled_before_it_was_wrapped(ranks: Ranks) -> None:
    import torch

    def make() -> Any:
        return torch.compile(zoo().low_rank_adaptation(), backend="aot_eager")

    compare_training(*ranks.pair(make), rows(ranks))


@PATTERNS.add
def a_model_that_was_compiled_after_it_was_wrapped(ranks: Ranks) -> None:
    import torch

    def compiled(model: Any) -> tuple[Any, list[str]]:
        graphs: list[str] = []

        def compiler(graph: Any, inputs: Any) -> Any:
            graphs.append(graph.code)
            return graph.forward

        return torch.compile(model, backend=compiler), graphs

    (ours, own), (theirs, other) = map(compiled, ranks.pair(zoo().low_rank_adaptation))
    compare_training(ours, theirs, rows(ranks))
    assert all(any("linear" in code for code in graphs) for graphs in (own, other))


@PATTERNS.add
def compiled_autograd_is_refused(ranks: Ranks) -> None:
    import torch
    from torch._dynamo import config

    def train(model: Any) -> None:
        rows(ranks)(model, 0).backward()

    for model in ranks.pair(zoo().low_rank_adaptation):
        with config.patch(compiled_autograd=True), pytest.raises(Exception, match="ompiled autograd"):
            torch.compile(train, backend="eager")(model)


@SLOW_PATTERNS.add
def a_model_that_inductor_compiled_before_it_was_wrapped(ranks: Ranks) -> None:
    import torch

    compare_training(*ranks.pair(lambda: torch.compile(zoo().Decoder())), zoo().prediction(ranks))


@SLOW_PATTERNS.add
def a_model_that_inductor_compiled_after_it_was_wrapped(ranks: Ranks) -> None:
    import torch

    ours, theirs = map(torch.compile, ranks.pair(zoo().Decoder))
    compare_training(ours, theirs, zoo().prediction(ranks))
