"""What DataParallel promises beyond equal gradients: same bits, lifetimes, refusals."""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from processes import run_processes
from scenarios import TIMEOUT, Ranks, Scenarios, outlive_the_others

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = Scenarios()


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=[2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@contextmanager
def refused(kind: str, text: str) -> Iterator[None]:
    """The block raises an error whose class is called ``kind`` with ``text`` in its message."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        yield
    assert caught.type.__name__ == kind


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))


def digest(model: Any) -> str:
    """A text that two models share exactly when their weights are bitwise equal."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@SCENARIOS.add
def weights_are_bitwise_equal_on_all_ranks_after_every_step_and_from_run_to_run(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    runs = []
    for _ in range(2):
        torch.manual_seed(ranks.rank)
        model = ranks.wrap(mlp(), bucket_cap_mb=0.05)
        # The same start in both runs; without it, they would begin with rank 0's random weights anyway.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        digests = []
        for step in range(20):
            optimizer.zero_grad()
            model(ranks.batch(step, 8, 6)).pow(2).mean().backward()
            optimizer.step()
            digests.append(digest(model))
        assert len(set(digests)) == 20
        everywhere: list[Any] = [None] * ranks.size
        dist.all_gather_object(everywhere, digests)
        assert everywhere == [digests] * ranks.size
        runs.append(digests)
    assert runs[0] == runs[1]


@SCENARIOS.add
def gradients_outlive_the_model_and_the_communicator(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    module = mlp()
    model = ranks.wrap(module)
    model(ranks.batch(0, 4, 6)).pow(2).mean().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    dist.barrier()
    ranks.communicator = None
    del model
    gc.collect()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
        parameter.grad += 1
        torch.testing.assert_close(parameter.grad, gradient + 1, rtol=0, atol=0)
    module.zero_grad()
    module(ranks.batch(0, 4, 6)).pow(2).mean().backward()
    if ranks.size > 1:
        assert not torch.equal(module[0].weight.grad, expected[0])


@SCENARIOS.add
def a_model_dies_with_its_last_reference(ranks: Ranks) -> None:
    import weakref

    import torch.distributed as dist

    model = ranks.wrap(mlp())
    model(ranks.batch(0, 4, 6)).pow(2).mean().backward()
    remains = weakref.ref(model)
    del model
    gc.collect()
    assert remains() is None
    dist.barrier()


@SCENARIOS.add
def it_passes_for_torchs_wrapper(ranks: Ranks) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ours, theirs = ranks.pair(mlp)
    assert isinstance(ours, DistributedDataParallel)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert ours.device == torch.device("cpu")
    with torch.no_grad():
        theirs.module[0].weight.fill_(3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.module[0].weight.eq(3).all()


@SCENARIOS.add
def wrapping_changes_the_values_of_weights_and_nothing_else(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(ranks.rank)
    module = mlp().eval()
    module[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    module(ranks.batch(0, 4, 6)).pow(2).mean().backward()
    optimizer.step()
    parameters = list(module.parameters())
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in optimizer.state]
    generator = torch.get_rng_state()
    model = ranks.wrap(module)
    assert model.module is module
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert [p.requires_grad for p in parameters] == [True, True, False, False, True, True]
    assert all((g is None) == (p.grad is None) for g, p in zip(gradients, parameters, strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, parameters, strict=True) if g is not None)
    assert all(torch.equal(m, optimizer.state[p]["exp_avg"]) for m, p in zip(moments, optimizer.state, strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert not module.training
    dist.barrier()


@SCENARIOS.add
def a_gradient_that_needs_a_graph_is_refused_and_the_next_pass_works(ranks: Ranks) -> None:
    import torch.distributed as dist

    model = ranks.wrap(mlp())
    dist.barrier()
    with refused("InvalidArgument", "backward(create_graph=True) through a synchronised model"):
        model(ranks.batch(0, 4, 6)).pow(2).mean().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(ranks.batch(0, 4, 6)).pow(2).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@SCENARIOS.add
def a_gradient_with_a_graph_is_allowed_where_it_stays_local(ranks: Ranks) -> None:
    import torch.distributed as dist

    model = ranks.wrap(mlp())
    dist.barrier()
    with model.no_sync():
        model(ranks.batch(0, 4, 6)).pow(2).mean().backward(create_graph=True)
    assert model.module[0].weight.grad.requires_grad
    model.zero_grad()


@SCENARIOS.add
def sparse_gradients_that_no_embedding_announced_are_refused(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    class Looking(torch.nn.Linear):
        def forward(self, rows: Any) -> Any:
            return torch.nn.functional.embedding(rows, self.weight, sparse=True)

    model = ranks.wrap(Looking(3, 10, bias=False))
    dist.barrier()
    with refused("InvalidArgument", "parameter weight received a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


@SCENARIOS.add
def a_dense_gradient_of_a_sparse_embedding_is_refused(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    class Tied(torch.nn.Embedding):
        def forward(self, rows: Any) -> Any:
            return super().forward(rows) @ self.weight.t()

    model = ranks.wrap(Tied(10, 3, sparse=True))
    dist.barrier()
    with refused("InvalidArgument", "received a dense gradient"):
        model(torch.tensor([1, 2])).sum().backward()


@SCENARIOS.add
def reentrant_checkpointing_is_refused_unless_the_caller_says_how_the_pass_ends(ranks: Ranks) -> None:
    import torch.distributed as dist
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, data: Any) -> Any:
            return self.head(checkpoint(self.body, data, use_reentrant=True))

    model = ranks.wrap(Checkpointed())
    dist.barrier()
    with refused("InvalidArgument", "call accelerator.backward(loss) instead of loss.backward()"):
        model(ranks.batch(0, 4, 6).requires_grad_()).sum().backward()


@SCENARIOS.add
def a_parameter_that_is_checkpointed_twice_with_reentry_is_refused(ranks: Ranks) -> None:
    import torch.distributed as dist
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, data: Any) -> Any:
            data = checkpoint(self.body, checkpoint(self.body, data, use_reentrant=True), use_reentrant=True)
            return self.head(data)

    model = ranks.wrap(Twice())
    dist.barrier()
    with refused("InvalidArgument", "use_reentrant=False"):
        model(ranks.batch(0, 4, 6).requires_grad_()).sum().backward()


@SCENARIOS.add
def a_model_without_trainable_parameters_is_refused(ranks: Ranks) -> None:
    import torch

    with refused("InvalidArgument", "the model has no parameter that requires a gradient"):
        ranks.wrap(torch.nn.Linear(2, 2).requires_grad_(False))


@SCENARIOS.add
def different_models_are_refused(ranks: Ranks) -> None:
    import torch

    with refused("MismatchedCollective", "rank 1: broadcast of [2, 3] float32"):
        ranks.wrap(torch.nn.Linear(2 + ranks.rank, 2))
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(ranks.rank != 1)
    with refused("MismatchedCollective", "every rank must build the same model"):
        ranks.wrap(module)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)


def wrap_and_go(attempts: int, how: str) -> list[str]:
    """The errors of ranks that connect, wrap a model and drop it at once, while others may not be done yet.

    Args:
        how: ``"connected"`` without the model; ``"left"``: the communicator is dropped too; ``"dropped"``: it is kept.
    """
    import torch
    import torch.distributed as dist

    from accelerate_cpp._native import create_backend
    from accelerate_cpp.parallel.data_parallel import DataParallel

    shared, rank, size = next(dist.rendezvous("env://"))
    errors: list[str] = []
    for attempt in range(attempts):
        store = dist.PrefixStore(str(attempt), shared)
        try:
            backend = create_backend(store, rank, size, TIMEOUT)
            if how != "connected":
                DataParallel(torch.nn.Linear(2, 2), backend.communicator, TIMEOUT)
        except Exception as error:
            errors.append(f"attempt {attempt}: {error!r}")
        if how == "dropped":
            store.set(f"dropped/{rank}", "")
            store.wait([f"dropped/{peer}" for peer in range(size)], TIMEOUT)
        del backend
        if len(errors) >= 3:
            break
    outlive_the_others(shared, rank, size)
    return errors


@pytest.mark.parametrize("how", ["connected", "left", "dropped"])
def test_a_rank_that_is_done_does_not_disturb_those_that_are_not_yet(how: str) -> None:
    assert run_processes(wrap_and_go, 3, 100, how) == [[], [], []]
