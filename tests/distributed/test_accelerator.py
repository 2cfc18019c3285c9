"""The façade, the states and logging in two real processes."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.


TRAINED = [(True, 1), (False, 1), (True, 3)]
METRICS = [(samples, dispatch) for samples in (7, 11, 12) for dispatch in (False, True)]


def accelerator(**arguments: Any) -> Any:
    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(backend="gloo"), *arguments.pop("kwargs_handlers", [])]
    return Accelerator(cpu=True, kwargs_handlers=handlers, **arguments)


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except Exception as error:
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        return kinds, str(error)
    return "", ""


def scenarios(folder: str) -> dict[str, Any]:
    """Everything that the tests look at, from one start of the processes; each scenario begins without a state."""
    from accelerate_cpp.state import AcceleratorState, GradientState

    results = {}
    for name, scenario in {
        "places": places,
        "waits": waits,
        "main_first": lambda: main_first(folder),
        "trained": lambda: {case: trained(8, *case) for case in TRAINED},
        "gradients": gradients,
        "metrics": lambda: {case: metrics(*case) for case in METRICS},
        "metrics_of_bunches": metrics_of_bunches,
        "wrong_metrics": wrong_metrics,
        "triggered": triggered,
        "logged": logged,
        "learning_rates": learning_rates,
    }.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        results[name] = scenario()
    return results


def trained_alone() -> dict[tuple[bool, int], Any]:
    return {case: trained(8, *case) for case in TRAINED}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of :func:`scenarios` on both ranks."""
    return run_processes(scenarios, 2, str(tmp_path_factory.mktemp("shared")))


def places() -> dict[str, Any]:
    own = accelerator()
    state = own.state
    printed = io.StringIO()
    with redirect_stdout(printed):
        state.print("x")
        own.print("y")
    with own.split_between_processes([1, 2, 3], apply_padding=True) as part:
        pass
    return {
        "places": (own.process_index, own.num_processes, own.local_process_index, own.is_last_process),
        "labels": (own.distributed_type.value, state.backend, own.use_distributed),
        "on": [
            own.on_main_process(lambda: "main")(),
            own.on_last_process(lambda: "last")(),
            own.on_process(process_index=1)(lambda: "one")(),
            own.on_local_main_process(lambda: "local")(),
            own.on_local_process(local_process_index=1)(lambda: "second")(),
        ],
        "printed": printed.getvalue(),
        "part": part,
    }


def test_each_process_knows_its_place(ranks: list[dict[str, Any]]) -> None:
    zero, one = (rank["places"] for rank in ranks)
    assert zero["places"] == (0, 2, 0, False)
    assert one["places"] == (1, 2, 1, True)
    assert zero["labels"] == one["labels"] == ("MULTI_CPU", "gloo", True)
    assert zero["on"] == ["main", None, None, "local", None]
    assert one["on"] == [None, "last", "one", None, "second"]
    assert (zero["printed"], one["printed"]) == ("x\ny\n", "")
    assert (zero["part"], one["part"]) == ([1, 2], [3, 3])


def waits() -> list[tuple[int, int]]:
    """When each kind of waiting began and ended, by the clock of the host."""
    from accelerate_cpp.utils import wait_for_everyone

    own, times = accelerator(), []
    for wait in (own.wait_for_everyone, own.state.wait_for_everyone, wait_for_everyone):
        began = time.monotonic_ns()
        wait()
        times.append((began, time.monotonic_ns()))
    return times


def test_no_process_goes_on_before_all_wait(ranks: list[dict[str, Any]]) -> None:
    for times in zip(*(rank["waits"] for rank in ranks), strict=True):
        assert max(began for began, _ in times) <= min(ended for _, ended in times)


def main_first(folder: str) -> tuple[bool, bool]:
    own, file = accelerator(), Path(folder) / "written"
    with own.main_process_first():
        if own.is_main_process:
            file.write_text("x")
        found = file.exists()
    with own.local_main_process_first():
        if own.is_local_main_process:
            file.with_suffix(".local").write_text("x")
        found = found and file.with_suffix(".local").exists()
    own.wait_for_everyone()

    def fails_on_the_main_process() -> None:
        with own.main_process_first():
            if own.is_main_process:
                raise KeyError("first")

    return found, "KeyError" in error_of(fails_on_the_main_process)[0]


def test_the_main_process_goes_first_and_an_error_in_it_does_not_hold_the_others(ranks: list[dict[str, Any]]) -> None:
    assert [rank["main_first"] for rank in ranks] == [(True, True), (True, False)]


def trained(global_batch: int, split_batches: bool, steps: int) -> tuple[list[float], list[float]]:
    """Losses over all processes and the final weights of a small regression on data that is the same everywhere."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import DataLoaderConfiguration
    from accelerate_cpp.state import AcceleratorState
    from accelerate_cpp.utils import set_seed

    AcceleratorState._reset_state(reset_partial_state=True)
    own = accelerator(
        gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(split_batches=split_batches)
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 3, generator=generator)
    batch_size = global_batch if split_batches else global_batch // own.num_processes
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)
    set_seed(own.process_index)
    model = torch.nn.Linear(3, 1)
    if own.num_processes == 1 or own.is_main_process:
        with torch.no_grad():
            model.weight.fill_(0.25)
            model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scheduler, loader, model, optimizer = own.prepare(scheduler, loader, model, optimizer)
    losses = []
    for _ in range(3):
        for features, targets in loader:
            with own.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                own.backward(loss)
                if own.sync_gradients:
                    own.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(own.reduce(loss, "mean").item())
    return losses, [value for tensor in own.get_state_dict(model).values() for value in tensor.flatten().tolist()]


def test_two_processes_train_as_one_does(ranks: list[dict[str, Any]]) -> None:
    (alone,) = run_processes(trained_alone, 1)
    for case in TRAINED:
        (losses, weights), (other_losses, other_weights) = (rank["trained"][case] for rank in ranks)
        losses_alone, weights_alone = alone[case]
        assert (losses, weights) == (other_losses, other_weights)
        assert losses == pytest.approx(losses_alone, rel=1e-5)
        assert weights == pytest.approx(weights_alone, rel=1e-4)


def gradients() -> dict[str, Any]:
    import torch

    own = accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    prepared = own.prepare(model)
    inputs = torch.full((1, 1), float(own.process_index + 1))
    with own.no_sync(prepared):
        own.backward(prepared(inputs).sum())
    local = model.weight.grad.item()
    own.backward(prepared(inputs).sum())
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    return {
        "local": local,
        "synchronised": model.weight.grad.item(),
        "same": own.unwrap_model(prepared) is model,
        "frozen": own.prepare(frozen) is frozen,
    }


def test_gradients_are_averaged_but_within_no_sync(ranks: list[dict[str, Any]]) -> None:
    zero, one = (rank["gradients"] for rank in ranks)
    assert (zero["local"], one["local"]) == (1.0, 2.0)
    assert zero["synchronised"] == one["synchronised"] == 3.0
    assert zero["same"]


def test_a_model_with_nothing_to_train_comes_back_as_it_is(ranks: list[dict[str, Any]]) -> None:
    assert [rank["gradients"]["frozen"] for rank in ranks] == [True, True]


def metrics(samples: int, dispatch: bool) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp import DataLoaderConfiguration
    from accelerate_cpp.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    own = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = own.prepare(DataLoader(range(samples), batch_size=3))
    seen: dict[str, list[Any]] = {"ids": [], "texts": [], "pickled": [], "losses": [], "filtered": []}
    for batch in loader:
        ids, loss, filtered = own.gather_for_metrics((batch, batch.float().mean(), torch.arange(5)))
        seen["ids"] += ids.tolist()
        seen["losses"].append(len(loss))
        seen["filtered"].append(len(filtered))
        seen["texts"] += own.gather_for_metrics([str(int(item)) for item in batch])
        seen["pickled"] += own.gather_for_metrics(batch.tolist(), use_gather_object=True)
    return seen


@pytest.mark.parametrize(("samples", "dispatch"), METRICS)
def test_metrics_see_every_sample_once_and_whatever_is_not_per_sample_whole(
    samples: int, dispatch: bool, ranks: list[dict[str, Any]]
) -> None:
    for seen in (rank["metrics"][samples, dispatch] for rank in ranks):
        assert sorted(seen["ids"]) == list(range(samples))
        assert sorted(map(int, seen["texts"])) == list(range(samples))
        assert sorted(seen["pickled"]) == list(range(samples))
        assert set(seen["losses"]) == {2}
        assert set(seen["filtered"]) == {10}


class Bunches:
    """A sampler of batches that says nothing of their size."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4, 5], [6, 7, 8])


def metrics_of_bunches() -> tuple[list[int], int]:
    import torch
    from torch.utils.data import DataLoader

    own = accelerator()
    seen, others = [], 0
    for batch in own.prepare(DataLoader(torch.arange(9), batch_sampler=Bunches())):
        rows, other = own.gather_for_metrics((batch, torch.arange(5)))
        seen += rows.tolist()
        others += len(other)
    return seen, others


def test_metrics_of_batches_without_a_common_size_see_every_sample_once(ranks: list[dict[str, Any]]) -> None:
    assert [rank["metrics_of_bunches"] for rank in ranks] == [([*range(9)], 20)] * 2


def wrong_metrics() -> tuple[str, str]:
    own = accelerator()
    return error_of(lambda: own.gather_for_metrics(object()))


def test_an_error_while_gathering_metrics_is_raised(ranks: list[dict[str, Any]]) -> None:
    for kinds, _ in (rank["wrong_metrics"] for rank in ranks):
        assert "TypeError" in kinds.split()


def triggered() -> list[bool]:
    own = accelerator()
    if own.process_index == 1:
        own.set_trigger()
    return [own.check_trigger(), own.check_trigger()]


def test_a_trigger_of_one_process_is_seen_by_all_once(ranks: list[dict[str, Any]]) -> None:
    assert [rank["triggered"] for rank in ranks] == [[True, False], [True, False]]


def logged() -> list[str]:
    import logging

    from accelerate_cpp.logging import get_logger

    accelerator()
    logger, messages = get_logger("tests.ranks", log_level="INFO"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.logger.addHandler(handler)
    logger.info("a")
    logger.info("b", main_process_only=False)
    logger.info("c", in_order=True)
    return messages


def test_messages_are_logged_once_or_everywhere(ranks: list[dict[str, Any]]) -> None:
    assert [rank["logged"] for rank in ranks] == [
        ["[RANK 0] a", "[RANK 0] b", "[RANK 0] c"],
        ["[RANK 1] b", "[RANK 1] c"],
    ]


def learning_rates() -> list[float]:
    import torch

    from accelerate_cpp.state import AcceleratorState

    rates = []
    for arguments in ({}, {"step_scheduler_with_optimizer": False}):
        AcceleratorState._reset_state(reset_partial_state=True)
        own = accelerator(**arguments)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer, scheduler = own.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_schedule_advances_once_for_every_process_unless_it_is_stepped_alone(ranks: list[dict[str, Any]]) -> None:
    assert [rank["learning_rates"] for rank in ranks] == [[0.25, 0.5], [0.25, 0.5]]
