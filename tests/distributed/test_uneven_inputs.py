"""Processes with different numbers of batches, and gradients that are weighed by what they are over."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

FEATURES, ROWS = 3, 10


def data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, 1, generator=generator)


def network() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(FEATURES, 1)


def sgd_by_hand(steps: list[list[int]]) -> list[float]:
    """One process trains on the mean over these rows in each step; the last weights."""
    import torch

    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in steps:
        optimizer.zero_grad()
        (model(inputs[rows]) - targets[rows]).pow(2).mean().backward()
        optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def rows_of_rank(rank: int, size: int, batch_size: int) -> list[list[int]]:
    """Batches of the rows that a rank gets when batches are dealt out in turn and none is completed."""
    batches = [list(range(start, min(start + batch_size, ROWS))) for start in range(0, ROWS, batch_size)]
    return batches[rank::size]


def trained(mode: str, backend: str) -> tuple[list[float], int, str]:
    """The weights after an epoch of uneven batches, the batches of this rank, and what was raised."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(*data()), batch_size=2)
    )
    count, raised = 0, ""
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False, mode=mode):
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward((model(inputs) - targets).pow(2).mean())
                optimizer.step()
                count += 1
    except ValueError as error:
        raised = f"{type(error).__name__}: {error}"
    if mode == "stop":
        assert loader.end_of_dataloader
    parameters = accelerator.unwrap_model(model)
    return [*parameters.weight.flatten().tolist(), *parameters.bias.tolist()], count, raised


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("shm", 3),
        ("gloo", 2),
        pytest.param("shm", 2, marks=pytest.mark.long),
        pytest.param("gloo", 3, marks=pytest.mark.long),
    ],
)
def test_joined_processes_train_as_one_on_the_samples_that_there_are(size: int, backend: str) -> None:
    if backend == "shm":
        steps = [
            list(chain.from_iterable(parts))
            for parts in _transposed([rows_of_rank(rank, size, 2) for rank in range(size)])
        ]
        expected = sgd_by_hand(steps)
    for weights, count, raised in run_processes(trained, size, "join", backend):
        assert not raised
        assert count in (5 // size, 5 // size + 1)
        if backend == "shm":
            assert weights == pytest.approx(expected, rel=1e-5)


def weighed_in_a_join(backend: str) -> list[float] | str:
    """The weights after a pass whose losses are sums, or why it is refused."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(*data()), batch_size=2)
    )
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward((model(inputs) - targets).pow(2).sum(), weight=len(inputs))
                optimizer.step()
    except ValueError as error:
        return str(error)
    parameters = accelerator.unwrap_model(model)
    return [*parameters.weight.flatten().tolist(), *parameters.bias.tolist()]


def test_weights_of_joined_processes_are_taken_or_refused() -> None:
    steps = [list(chain.from_iterable(parts)) for parts in _transposed([rows_of_rank(rank, 2, 2) for rank in range(2)])]
    for found in run_processes(weighed_in_a_join, 2, "shm"):
        assert found == pytest.approx(sgd_by_hand(steps), rel=1e-5)
    for found in run_processes(weighed_in_a_join, 2, "gloo"):
        assert "follows torch's wrapper, not the weights of the others" in found


def by_torch() -> list[float]:
    """Torch's wrapper within torch's ``Join``, on full batches of which rank 0 has one more."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms import Join
    from torch.nn.parallel import DistributedDataParallel

    from accelerate_cpp import PartialState

    PartialState(cpu=True)
    inputs, targets = data()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], divide_by_initial_world_size=False):
        for rows in rows_of_rank(dist.get_rank(), dist.get_world_size(), 2):
            optimizer.zero_grad()
            (model(inputs[rows]) - targets[rows]).pow(2).mean().backward()
            optimizer.step()
    return [*model.module.weight.flatten().tolist(), *model.module.bias.tolist()]


def test_joined_processes_train_as_with_the_wrapper_and_join_of_torch() -> None:
    (expected, _), found = run_processes(by_torch, 2), run_processes(trained, 2, "join", "shm")
    for weights, _, _ in found:
        assert weights == pytest.approx(expected, rel=1e-5)


def _transposed(ranks: list[list[list[int]]]) -> list[list[list[int]]]:
    longest = max(map(len, ranks))
    return [[batches[step] for batches in ranks if step < len(batches)] for step in range(longest)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_with_stop_all_processes_end_together(backend: str) -> None:
    results = run_processes(trained, 2, "stop", backend)
    assert [(count, raised) for _, count, raised in results] == [(2, "")] * 2
    assert results[0][0] == pytest.approx(sgd_by_hand([[0, 1, 2, 3], [4, 5, 6, 7]]), rel=1e-5)
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_with_error_all_processes_raise_and_name_the_one_without_batches(backend: str) -> None:
    for _, count, raised in run_processes(trained, 2, "error", backend):
        assert count == 2
        assert raised.startswith("InvalidArgument: rank 1 had 2 batches, and rank 0 had more")


def without_a_context() -> None:
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    for _ in range(5 - accelerator.process_index):
        accelerator.backward(model(torch.ones(2, FEATURES)).mean())
    accelerator.wait_for_everyone()


def test_without_a_context_uneven_processes_raise_at_once_and_name_each_other() -> None:
    outcomes = start_processes(without_a_context, 2)
    assert all(outcome.exit_code == 1 for outcome in outcomes)  # one that hung has been killed, which is another code
    assert all("rank 0" in outcome.stderr and "rank 1" in outcome.stderr for outcome in outcomes)


def buffers_of_joined() -> list[float]:
    """Batch norm's running mean, which the ranks that train on broadcast, after rank 0 ran out of batches."""
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 1))
    model = accelerator.prepare(module)
    with accelerator.join_uneven_inputs([model]):
        for step in range(2 + 3 * accelerator.process_index):
            batch = torch.full((4, 2), float(step + 10 * accelerator.process_index)) + torch.randn(4, 2)
            accelerator.backward(model(batch).sum())
    mean: list[float] = module[0].running_mean.tolist()
    return mean


def test_the_model_at_the_end_is_that_of_a_process_that_trained_to_the_end() -> None:
    first, second = run_processes(buffers_of_joined, 2)
    assert first == second
    assert min(first) > 4  # three more updates from values around 13, rather than two from around 0


def weighed(lengths: list[list[list[int]]], backend: str, precision: str) -> list[float]:
    """The gradient of token sums in micro-steps; ``lengths[rank][micro_step]`` are those of the sequences."""
    import torch

    from accelerate_cpp import Accelerator, GradScalerKwargs, InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(backend=backend), GradScalerKwargs(init_scale=64.0)]
    steps = len(lengths[0])
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=handlers, gradient_accumulation_steps=steps, mixed_precision=precision
    )
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        optimizer.zero_grad()
        for step, own in enumerate(lengths[accelerator.process_index % len(lengths)]):
            with accelerator.accumulate(model):
                loss = sum(token_losses(model, accelerator.process_index, step, length).sum() for length in own)
                accelerator.backward(loss, weight=sum(own))
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
    weight: list[float] = accelerator.unwrap_model(model).weight.grad.flatten().tolist()
    return weight


def token_losses(model: Any, rank: int, step: int, length: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + length)
    return model(torch.randn(length, FEATURES, generator=generator)).pow(2)


def in_one_batch(lengths: list[list[list[int]]]) -> list[float]:
    import torch

    model = network()
    losses = [
        token_losses(model, rank, step, length)
        for rank, steps in enumerate(lengths)
        for step, own in enumerate(steps)
        for length in own
    ]
    torch.cat(losses).mean().backward()
    gradient: list[float] = model.weight.grad.flatten().tolist()
    return gradient


LENGTHS = [[[5], [20]], [[10], [3]]]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_token_weighted_gradients_equal_those_of_one_big_batch(backend: str) -> None:
    expected = in_one_batch(LENGTHS)
    for gradient in run_processes(weighed, 2, LENGTHS, backend, "no"):
        assert gradient == pytest.approx(expected, rel=1e-6)


def test_token_weights_work_in_one_process_and_with_a_loss_scaler() -> None:
    expected = in_one_batch(LENGTHS[:1])
    for precision, tolerance in (("no", 1e-6), ("fp16", 1e-2)):
        assert run_processes(weighed, 1, LENGTHS[:1], "gloo", precision)[0] == pytest.approx(expected, rel=tolerance)


def misused() -> list[str]:
    import torch

    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def backward(**options: Any) -> str:
        try:
            accelerator.backward(model(torch.ones(2, FEATURES)).sum(), **options)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "fine"

    found = [backward(weight=2), backward(weight=2), backward()]
    optimizer.zero_grad()
    found.append(backward())
    found.append(backward())  # without weights, synchronised passes add up
    optimizer.step()
    model.zero_grad()
    found.append(backward(weight=torch.tensor(4)))
    model.zero_grad()
    found.append(backward(weight=-1))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_pass_after_a_weighted_average_is_refused(size: int) -> None:
    for found in run_processes(misused, size):
        assert [one.split(":")[0] for one in found] == [
            "fine",
            "InvalidArgument",
            "InvalidArgument",
            "fine",
            "fine",
            "fine",
            "InvalidArgument",
        ]
        assert "after its gradients had already been divided by their weights" in found[1]


def with_momentum(backend: str, accumulated: int) -> tuple[list[float], list[float]]:
    """Two epochs of uneven batches with an optimizer that has a state, and a schedule: the weights and the rates."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    run = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = data()
    model, optimizer, schedule, loader = run.prepare(
        model,
        plain,
        torch.optim.lr_scheduler.ExponentialLR(plain, 0.9),
        DataLoader(TensorDataset(inputs, targets), batch_size=2),
    )
    for _ in range(2):
        with run.join_uneven_inputs([model], even_batches=False):
            for batch, wanted in loader:
                with run.accumulate(model):
                    loss = (model(batch) - wanted).pow(2)
                    run.backward(loss.mean())
                    optimizer.step()
                    if run.sync_gradients:
                        schedule.step()
                    optimizer.zero_grad()
    parameters = run.unwrap_model(model)
    return [*parameters.weight.flatten().tolist(), *parameters.bias.tolist()], schedule.get_last_lr()


def by_one_process(accumulated: int) -> tuple[list[float], list[float]]:
    """The same in plain torch, on four rows for each pass, which are the last two at the end of an epoch."""
    import torch

    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        for rows in torch.arange(ROWS).split(4 * accumulated):
            (model(inputs[rows]) - targets[rows]).pow(2).mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()], schedule.get_last_lr()


@pytest.mark.parametrize(("backend", "accumulated"), [("shm", 1), ("shm", 2), ("gloo", 1), ("gloo", 2), ("shm", 3)])
def test_processes_that_ran_out_of_batches_have_the_momentum_and_the_schedule_of_those_that_did_not(
    backend: str, accumulated: int
) -> None:
    (expected, rates) = run_processes(by_one_process, 1, accumulated)[0]
    for weights, own_rates in run_processes(with_momentum, 2, backend, accumulated):
        assert weights == pytest.approx(expected, rel=1e-4)
        assert own_rates == pytest.approx(rates)


def uneven(accumulated: int = 1, precision: str = "no", rows: int = 2, mine: tuple[int, int] = (2, 6)) -> Any:
    """An accelerator, and a prepared loader with more batches of ``rows`` rows on rank 1 than on rank 0."""
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator, DataLoaderConfiguration

    class Own(torch.utils.data.IterableDataset[torch.Tensor]):
        # Of as many files as there are processes, each of which reads one.
        n_shards = 2

        def shard(self, num_shards: int, index: int) -> Own:
            self.samples = rows * mine[index]
            return self

        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(self.samples)
            yield from torch.randn(self.samples, 3, generator=generator)

    configuration = DataLoaderConfiguration(dispatch_batches=False)
    run = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated,
        mixed_precision=precision,
        dataloader_config=configuration,
    )
    return run, run.prepare(DataLoader(Own(), batch_size=rows))


def buffers_with_accumulation(evaluates: bool) -> list[float]:
    """The mean of the last rows of a rank that had more of them, as normalisation sees it at the end.

    Args:
        evaluates: at the end of the block, too.
    """
    import torch

    run, loader = uneven(accumulated=2)
    norm = torch.nn.BatchNorm1d(3, momentum=1.0)
    model = torch.nn.Sequential(norm, torch.nn.Linear(3, 1))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    others = run.prepare(torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=1))
    with run.join_uneven_inputs([model]):
        for batch in loader:
            with run.accumulate(model):
                run.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                for batch in others:
                    model(batch)
    found: list[float] = norm.running_mean.tolist()
    return found


def last_mean() -> list[float]:
    import torch

    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(12))
    found: list[float] = rows[-2:].mean(0).tolist()
    return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_batches_that_are_repeated_leave_no_trace_in_buffers(evaluates: bool) -> None:
    (expected,) = run_processes(last_mean, 1)
    for found in run_processes(buffers_with_accumulation, 2, evaluates):
        assert found == pytest.approx(expected, rel=1e-5)


def overflows_in_fp16(accumulated: int) -> tuple[int, float]:
    """How many steps were left out, and the scale at the end, with batches of many rows."""
    import torch

    run, loader = uneven(accumulated, "fp16", rows=128)
    model = torch.nn.Linear(3, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    skipped = 0
    with run.join_uneven_inputs([model]):
        for batch in loader:
            with run.accumulate(model):
                run.backward(model(batch).square().mean() * 0.01)
                optimizer.step()
                skipped += optimizer.step_was_skipped
                optimizer.zero_grad()
    return skipped, run.scaler.get_scale()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_of_many_rows_stay_as_large_as_they_are(accumulated: int) -> None:
    assert run_processes(overflows_in_fp16, 2, accumulated) == [(0, 65536.0)] * 2


def with_evaluations(accumulated: int) -> list[float]:
    """The weights after batches of 3 rows, and one of a single row; each is read, and others are before it is used."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import Accelerator

    run = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    inputs, targets = data()
    plain = network()
    model, optimizer, loader, others = run.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        DataLoader(TensorDataset(inputs, targets), batch_size=3),
        DataLoader(inputs, batch_size=5),
    )
    with run.join_uneven_inputs([model], even_batches=False):
        for batch, wanted in loader:
            with torch.no_grad():
                for one in others:
                    model(one)
            with run.accumulate(model):
                run.backward((model(batch) - wanted).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [*plain.weight.flatten().tolist(), *plain.bias.tolist()]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_weighs_what_it_has_although_others_were_read_before_it_was_used(accumulated: int) -> None:
    steps = [[*range(ROWS)]] if accumulated == 2 else [[*range(6)], [*range(6, ROWS)]]
    for weights in run_processes(with_evaluations, 2, accumulated):
        assert weights == pytest.approx(sgd_by_hand(steps), rel=1e-5)


def with_a_state_that_cannot_be_sent() -> tuple[list[float], list[str]]:
    import warnings

    import torch

    class Halving(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.factor = lambda: 0.5
            super().__init__(optimizer)

        def get_lr(self) -> list[Any]:
            return [group["lr"] * (self.factor() if self.last_epoch else 1.0) for group in self.optimizer.param_groups]

    run, loader = uneven()
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = run.prepare(model, plain, Halving(plain))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with run.join_uneven_inputs([model]):
            for batch in loader:
                run.backward(model(batch).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    told = [str(one.message) for one in caught if "join_uneven_inputs" in str(one.message)]
    return [group["lr"] for group in plain.param_groups], told


def test_a_state_that_cannot_be_sent_is_named_and_the_run_goes_on() -> None:
    for rates, [message] in run_processes(with_a_state_that_cannot_be_sent, 2):
        assert rates == [pytest.approx(0.5**12)]  # of the optimizer, which has a state that can be
        assert "the state of AcceleratedScheduler is not handed on" in message


def penalised() -> bool:
    """With a gradient penalty, whose first pass gives no parameter a gradient."""
    import torch

    run, loader = uneven(accumulated=2)
    model = torch.nn.Linear(3, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with run.join_uneven_inputs([model]):
        for batch in loader:
            with run.accumulate(model):
                batch.requires_grad_()
                (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
                run.backward(model(batch).mean() + slope.square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return True


def test_a_penalty_on_gradients_is_no_pass_of_its_own() -> None:
    assert run_processes(penalised, 2) == [True, True]


def of_a_list_and_of_a_loader() -> tuple[float, bool]:
    """The gradient where rank 0 reads a prepared loader and rank 1 a list; and whether the model still joins after."""
    import torch

    run, loader = uneven(rows=4, mine=(1, 1))
    model = torch.nn.Linear(3, 1, bias=False)
    model = run.prepare(model)
    with run.join_uneven_inputs([model]):
        for _ in loader if run.process_index == 0 else [None]:
            run.backward(model(torch.ones(4, 3)).mean())
    joins: bool = model._join_config.enable
    return next(model.parameters()).grad[0, 0].item(), joins


def test_shares_add_up_where_a_process_does_not_tell_its_rows_and_a_block_leaves_nothing_behind() -> None:
    assert run_processes(of_a_list_and_of_a_loader, 2) == [(1.0, False)] * 2
