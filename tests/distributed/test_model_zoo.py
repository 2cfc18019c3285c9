"""Models of many kinds get the gradients that torch's DistributedDataParallel over Gloo gives them, within 1e-6."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from processes import run_processes
from scenarios import Ranks, Scenarios, compare_passes, compare_training
from training_patterns import PATTERNS, SLOW_PATTERNS, zoo

# Torch, and the models with it, is imported inside the functions: they run in processes of their own.

SCENARIOS = Scenarios()


@SCENARIOS.add
def convolutions_with_batch_norm(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, partial(zoo().images, ranks))
    compare_training(*ranks.pair(zoo().convolutions_with_batch_norm), loss)


@SCENARIOS.add
def convolutions_with_group_norm_in_channels_last(ranks: Ranks) -> None:
    import torch

    def data(step: int) -> Any:
        return zoo().images(ranks, step).to(memory_format=torch.channels_last)

    ours, theirs = ranks.pair(zoo().convolutions_in_channels_last)
    compare_training(ours, theirs, zoo().classification(ranks, data))
    assert ours.module[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@SCENARIOS.add
def a_residual_network(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, partial(zoo().images, ranks))
    compare_training(*ranks.pair(zoo().residual_network), loss)


@SCENARIOS.add
def a_transformer_whose_output_layer_shares_the_weights_of_its_embedding(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(zoo().TiedEncoder)
    compare_training(ours, theirs, zoo().prediction(ranks))
    assert ours.module.output.weight is ours.module.embedding.weight


@SCENARIOS.add
def a_decoder_with_causal_attention(ranks: Ranks) -> None:
    compare_training(*ranks.pair(zoo().Decoder), zoo().prediction(ranks))


@SCENARIOS.add
def a_decoder_with_checkpoints_and_dropout(ranks: Ranks) -> None:
    compare_training(*ranks.pair(partial(zoo().Decoder, again=True, dropout=0.2)), zoo().prediction(ranks))


@SCENARIOS.add
def a_decoder_with_reentrant_checkpoints(ranks: Ranks) -> None:
    make = partial(zoo().Decoder, again=True, reentrant=True, dropout=0.2)
    loss = zoo().prediction(ranks)

    def passes(model: Any, step: int) -> Iterator[None]:
        told = getattr(model, "expect_backward", None)
        if told is not None:  # as accelerator.backward() does
            told()
        loss(model, step).backward()
        if told is not None:
            model.backward_ended()
        yield

    compare_passes(*ranks.pair(make), passes)


@SCENARIOS.add
def an_lstm(ranks: Ranks) -> None:
    from torch import nn

    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 4, 9))
    compare_training(*ranks.pair(partial(zoo().Recurrent, nn.LSTM)), loss)


@SCENARIOS.add
def a_gru(ranks: Ranks) -> None:
    from torch import nn

    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 4, 9))
    compare_training(*ranks.pair(partial(zoo().Recurrent, nn.GRU)), loss)


@SCENARIOS.add
def a_mixture_of_experts_of_which_ranks_use_different_ones_and_one_is_never_used(ranks: Ranks) -> None:
    def loss(model: Any, step: int) -> Any:
        used = [0, 1 if (ranks.rank + step) % 2 else 2]
        return zoo().classification(ranks, lambda step: ranks.batch(step, 6, 8))(partial(model, used=used), step)

    ours, theirs = ranks.pair(zoo().MixtureOfExperts, find_unused_parameters=True)
    compare_training(ours, theirs, loss)
    assert all(parameter.grad is None for parameter in ours.module.experts[3].parameters())
    assert all(parameter.grad is not None for parameter in ours.module.experts[0].parameters())


@SCENARIOS.add
def low_rank_adaptation_of_a_frozen_base(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, lambda step: ranks.batch(step, 6, 8))
    ours, theirs = ranks.pair(zoo().low_rank_adaptation)
    compare_training(ours, theirs, loss)
    assert ours.module[0].base.weight.grad is None


@SCENARIOS.add
def a_bag_of_words_with_dense_gradients(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 6, 5))
    compare_training(*ranks.pair(partial(zoo().bag_of_words, sparse=False)), loss)


@SCENARIOS.add
def a_bag_of_words_with_sparse_gradients(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 6, 5))
    compare_training(*ranks.pair(partial(zoo().bag_of_words, sparse=True)), loss, momentum=0)


@SCENARIOS.add
def an_embedding_with_sparse_gradients_and_more_words_on_some_ranks(ranks: Ranks) -> None:
    loss = zoo().classification(ranks, lambda step: zoo().words(ranks, step, 4 + 3 * ranks.rank))
    compare_training(*ranks.pair(zoo().word_classifier), loss, momentum=0)


@SCENARIOS.add
def an_autoencoder_with_a_scalar_parameter_and_odd_sizes(ranks: Ranks) -> None:
    def loss(model: Any, step: int) -> Any:
        data = ranks.batch(step, 4, 3, 8, 8)
        return (model(data) - data).square().mean()

    compare_training(*ranks.pair(zoo().Autoencoder), loss)


@SCENARIOS.add
def parameters_of_four_dtypes(ranks: Ranks) -> None:
    def loss(batch: int, model: Any, _: int) -> Any:
        return (model(ranks.batch(batch, 16, 8)) - 1).square().mean()

    ours, theirs = ranks.pair(zoo().FourDtypes)
    for batch in range(4):
        compare_training(ours, theirs, partial(loss, batch), steps=1)
        # From equal weights: those of 16 bits, which torch rounds more often, change the gradients of the others.
        theirs.load_state_dict(ours.state_dict())


@SCENARIOS.add
def parametrized_weights(ranks: Ranks) -> None:
    compare_training(*ranks.pair(zoo().parametrized), zoo().classification(ranks, lambda step: ranks.batch(step, 6, 8)))


@SCENARIOS.add
def complex_weights(ranks: Ranks) -> None:
    compare_training(*ranks.pair(zoo().Complex), zoo().classification(ranks, lambda step: ranks.batch(step, 6, 16)))


@SCENARIOS.add
def a_siamese_network_that_calls_its_body_twice(ranks: Ranks) -> None:
    def loss(model: Any, step: int) -> Any:
        return (model(zoo().images(ranks, step), zoo().images(ranks, step + 50)) - 1).square().mean()

    compare_training(*ranks.pair(zoo().Siamese), loss)


SCENARIOS.update(PATTERNS)
SIZES = [1, 2, 3, pytest.param(4, marks=pytest.mark.long)]


def run_scenarios(through_group: bool) -> dict[str, str]:
    return SCENARIOS.run(through_group)


def run_slow_scenarios() -> dict[str, str]:
    return SLOW_PATTERNS.run()


@pytest.fixture(scope="module", params=[3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2, 4))])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param, False, timeout=280)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def failures_through_a_group(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param, True, timeout=280)


@pytest.fixture(scope="module", params=SIZES)
def slow_failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_slow_scenarios, request.param, timeout=880)


def check(failures: list[dict[str, str]], name: str) -> None:
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    check(failures, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank_where_a_process_group_sums(failures_through_a_group: list[dict[str, str]], name: str) -> None:
    check(failures_through_a_group, name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW_PATTERNS)
def test_slow_on_every_rank(slow_failures: list[dict[str, str]], name: str) -> None:
    check(slow_failures, name)
