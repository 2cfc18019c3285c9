"""Models whose sequences are split over processes train through the Accelerator as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshes import (
    TOKENS,
    accelerator,
    batches,
    loss_of,
    network,
    num_processes,
    one_process,
    same,
    same_weights,
    several,
    sgd,
    share_of,
)
from processes import run_processes
from scenarios import failures_of

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

MESHES = {
    "sequences": {"cp_size": 2},
    "copies": {"dp_replicate_size": 2, "cp_size": 2},
    "shards": {"dp_shard_size": 2, "cp_size": 2},
    "split layers": {"cp_size": 2, "tp_size": 2},
    "copies of split layers": {"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2},
}
SCENARIOS: dict[str, Callable[..., None]] = {}


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def trains_and_clips_as_one_process(sizes: dict[str, int], attention: str, folder: str) -> None:
    run = accelerator(sizes, attention=attention)
    assert run.context_parallel_rank == run._session.topology.mesh.place("cp")
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain, _ = one_process(expected, batches(), max_norm=0.4)
    same(several(run, model, optimizer, batches(), max_norm=0.4), plain)
    same_weights(run, model, expected)


@scenario
def samples_that_are_left_out_count_in_no_process(sizes: dict[str, int], attention: str, folder: str) -> None:
    """Labels that do not count are not equally many in each part of a sequence."""
    run = accelerator(sizes, attention=attention)
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain = sgd(expected)
    for inputs, targets in batches():
        targets[:, : TOKENS // 2 + 1] = 0
        counts = (targets != 0).any(-1)
        ((expected(inputs) - targets).square().mean(-1) * counts).sum().div(counts.sum()).backward()
        plain.step()
        plain.zero_grad()
        own = [share_of(run, rows).clone() for rows in (inputs, targets, counts)]
        with run.maybe_context_parallel(buffers=own, buffer_seq_dims=[1, 1, 1]):
            rows, labels, counted = own
            loss = ((model(rows) - labels).square().mean(-1) * counted).sum()
            run.backward(loss, weight=int(counted.sum()))
        optimizer.step()
        optimizer.zero_grad()
    same_weights(run, model, expected)


@scenario
def accumulates_and_goes_on_from_checkpoints(sizes: dict[str, int], attention: str, folder: str) -> None:
    run = accelerator(sizes, attention=attention, gradient_accumulation_steps=2)
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain = sgd(expected)

    def train(data: list[Any]) -> None:
        for inputs, targets in data:
            own = [share_of(run, rows).clone() for rows in (inputs, targets)]
            with run.accumulate(model), run.maybe_context_parallel(buffers=own, buffer_seq_dims=[1, 1]):
                run.backward(loss_of(model, *own))
                optimizer.step()
                optimizer.zero_grad()

    for number, (inputs, targets) in enumerate(batches(steps=4), 1):
        (loss_of(expected, inputs, targets) / 2).backward()
        if number % 2 == 0:
            plain.step()
            plain.zero_grad()
    train(batches(steps=2))
    run.save_state(f"{folder}/c")
    train(batches(40, 2))
    run.load_state(f"{folder}/c")
    train(batches(steps=4)[2:])
    same_weights(run, model, expected)


def run_scenarios(sizes: dict[str, int], attention: str, backend: str, folder: str) -> dict[str, str]:
    return failures_of(SCENARIOS, backend, sizes, attention, folder)


@pytest.mark.parametrize(
    ("mesh", "attention", "backend"),
    [
        ("sequences", "allgather", "shm"),
        pytest.param("sequences", "alltoall", "gloo", marks=pytest.mark.long),
        pytest.param("sequences", "ulysses", "shm", marks=pytest.mark.long),
        pytest.param("copies", "alltoall", "shm", marks=pytest.mark.long),
        ("shards", "alltoall", "shm"),
        pytest.param("split layers", "allgather", "shm", marks=pytest.mark.long),
        pytest.param("copies of split layers", "alltoall", "shm", marks=pytest.mark.long),
    ],
)
def test_processes_that_split_sequences(mesh: str, attention: str, backend: str, tmp_path: Path) -> None:
    sizes = MESHES[mesh]
    failures = run_processes(run_scenarios, num_processes(sizes), sizes, attention, backend, str(tmp_path), timeout=500)
    assert failures == [{}] * num_processes(sizes), "\n".join(text for own in failures for text in own.values())
