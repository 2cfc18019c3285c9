"""Gradients that are synchronised though the forward pass was not to, and who is who, in two real processes."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.


def scenarios(backend: str | None) -> dict[str, Any]:
    from accelerate_cpp import Accelerator, InitProcessGroupKwargs

    handlers = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    own = Accelerator(cpu=True, kwargs_handlers=handlers)
    return {
        "gradients": gradients(own),
        "after an error": after_an_error(own),
        "kinds": (own.state.backend, own.multi_device, own.should_save_model),
        "dispatched": dispatched(own),
    }


def gradients(own: Any) -> list[float]:
    """The gradient after a pass that accumulates, one that is triggered, and one that accumulates again."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, seen = own.prepare(model), []
    inputs = torch.full((1, 1), float(own.process_index + 1))
    with own.no_sync(prepared):
        losses = [prepared(inputs * factor).sum() for factor in (1, 10)]
    own.backward(losses[0])
    seen.append(model.weight.grad.item())
    with own.trigger_sync_in_backward(prepared):
        own.backward(losses[1])
    seen.append(model.weight.grad.item())
    with own.no_sync(prepared):
        own.backward(prepared(inputs).sum())
    seen.append(model.weight.grad.item())
    return seen


def after_an_error(own: Any) -> list[Any]:
    """Whether passes synchronise after a block that was left by an exception, and the gradient of one that does."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    prepared, seen = own.prepare(model), []
    with own.no_sync(prepared):
        try:
            with own.trigger_sync_in_backward(prepared):
                seen.append(prepared.require_backward_grad_sync)
                raise KeyError
        except KeyError:
            seen.append(prepared.require_backward_grad_sync)
    own.backward(prepared(torch.full((1, 1), float(own.process_index + 1))).sum())
    return [*seen, model.weight.grad.item()]


def dispatched(own: Any) -> list[tuple[int, int, bool]]:
    """Remainder of a dispatched loader that begins, as the state and the loader see it."""
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp.data_loader import prepare_data_loader

    loader: Any = prepare_data_loader(
        DataLoader(range(7), batch_size=2),  # type: ignore[arg-type]
        torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=True,
    )
    seen = []
    for expected_active in (True, False):
        (loader.begin if expected_active else loader.end)()
        active = own.gradient_state.active_dataloader is loader
        seen.append((own.gradient_state.remainder, loader.state.num_processes, active))
    return seen


@pytest.fixture(scope="module", params=[None, "gloo"], ids=["shm", "gloo"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of :func:`scenarios` on both ranks."""
    results = run_processes(scenarios, 2, request.param)
    assert [rank["kinds"][0] for rank in results] == [request.param or "shm"] * 2
    return results


def test_a_triggered_pass_averages_what_accumulated_along_with_its_own(ranks: list[dict[str, Any]]) -> None:
    zero, one = (rank["gradients"] for rank in ranks)
    # Locally 1 and 2, then averages of 11 and 22, to which the last pass adds 1 and 2 again.
    assert zero == pytest.approx([1.0, 16.5, 17.5])
    assert one == pytest.approx([2.0, 16.5, 18.5])


def test_leaving_the_block_by_an_error_restores_what_was_chosen(ranks: list[dict[str, Any]]) -> None:
    assert [rank["after an error"] for rank in ranks] == [[True, False, 1.5]] * 2


def test_processes_on_cpus_are_no_devices_and_one_of_a_host_saves(ranks: list[dict[str, Any]]) -> None:
    assert [rank["kinds"][1:] for rank in ranks] == [(False, True), (False, False)]


def test_a_dispatched_loader_that_begins_is_active_on_every_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["dispatched"] == [(3, 2, True), (-1, 2, False)]
