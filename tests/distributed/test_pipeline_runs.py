"""Models in stages train through the Accelerator as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshes import (
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
    "stages": {"pp_size": 2},
    "copies of stages": {"dp_replicate_size": 2, "pp_size": 2},
    "shards of stages": {"dp_shard_size": 2, "pp_size": 2},
    "split stages": {"pp_size": 2, "tp_size": 2},
    "copies of split stages": {"dp_replicate_size": 2, "pp_size": 2, "tp_size": 2},
    "shards of split stages": {"dp_shard_size": 2, "pp_size": 2, "tp_size": 2},
}
SCENARIOS: dict[str, Callable[..., None]] = {}


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[function.__name__] = function
    return function


def square(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).square().mean()


def trained(run: Any, model: Any, optimizer: Any, data: list[Any], max_norm: float = 1e9) -> list[Any]:
    found = []
    for inputs, targets in data:
        loss = run.train_batch(share_of(run, inputs), square, share_of(run, targets), model=model)
        norm = run.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((run.reduce(loss, "mean").item(), norm.item()))
    return found


@scenario
def trains_and_clips_as_one_process(sizes: dict[str, int], schedule: str, folder: str) -> None:
    import torch

    run = accelerator(sizes, stages={"schedule": schedule})
    assert run.pipeline_parallel_rank == run._session.topology.mesh.place("pp")
    model, expected = network(), network()
    if not run.is_main_process:
        torch.nn.init.zeros_(model[0].weight)  # all start from rank 0
        torch.nn.init.zeros_(model[2].fc1.weight)
    model, optimizer = run.prepare(model, sgd(model))
    plain, _ = one_process(expected, batches(), max_norm=0.4)
    same(trained(run, model, optimizer, batches(), max_norm=0.4), plain)
    same_weights(run, model, expected)
    stepped = [one for group in optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in stepped} == {id(one) for one in model.parameters()}
    inputs, targets = batches(90, 1)[0]
    found = run.eval_batch(share_of(run, inputs), square, share_of(run, targets))
    torch.testing.assert_close(found.outputs, share_of(run, expected(inputs)).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"call train_batch"):
        model(inputs)
    with pytest.raises(ValueError, match=r"call accelerator\.train_batch"):
        run.backward(torch.ones((), requires_grad=True))


@scenario
def accumulates_as_one_process(sizes: dict[str, int], schedule: str, folder: str) -> None:
    run = accelerator(sizes, stages={"schedule": schedule}, gradient_accumulation_steps=2)
    expected = network()
    model, optimizer = run.prepare(model := network(), sgd(model))
    plain = sgd(expected)
    for number, (inputs, targets) in enumerate(batches(steps=6), 1):
        (loss_of(expected, inputs, targets) / 2).backward()
        if number % 2 == 0:
            plain.step()
            plain.zero_grad()
        with run.accumulate(model):
            run.train_batch(share_of(run, inputs), square, share_of(run, targets))
            optimizer.step()
            optimizer.zero_grad()
    same_weights(run, model, expected)


@scenario
def goes_on_from_checkpoints_also_without_stages(sizes: dict[str, int], schedule: str, folder: str) -> None:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    run = accelerator(sizes, stages={"schedule": schedule})
    model, optimizer = run.prepare(model := network(), sgd(model))
    trained(run, model, optimizer, batches())
    run.save_state(f"{folder}/c")
    expected = network()
    _, plain = one_process(expected, batches())
    then, _ = one_process(expected, batches(100, 3), plain)
    trained(run, model, optimizer, batches(50, 2))
    run.load_state(f"{folder}/c")
    same(trained(run, model, optimizer, batches(100, 3)), then)
    same_weights(run, model, expected)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    other = Accelerator(cpu=True)
    copies, optimizer = other.prepare(copies := network(), sgd(copies))
    other.load_state(f"{folder}/c")
    same(several(other, copies, optimizer, batches(100, 3)), then)


@scenario
def loaders_give_the_same_batches_to_all_stages(sizes: dict[str, int], schedule: str, folder: str) -> None:
    import torch

    run = accelerator(sizes)
    data = torch.arange(16).reshape(16, 1)
    loader = run.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    mesh = run._session.topology.mesh
    whole = data.flatten().reshape(-1, mesh.data_size, 2)
    assert [batch.flatten().tolist() for batch in loader] == whole[:, mesh.data_rank].tolist()
    gathered = torch.cat([run.gather_for_metrics(batch) for batch in loader])
    assert gathered.flatten().tolist() == list(range(16))


@scenario
def every_epoch_is_shuffled_alike_in_all_stages(sizes: dict[str, int], schedule: str, folder: str) -> None:
    import torch

    run = accelerator(sizes)
    torch.manual_seed(run.process_index)
    loader = run.prepare(torch.utils.data.DataLoader(range(16), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    mesh = run._session.topology.mesh
    for _ in range(2):
        torch.rand(run.process_index)
        everyones = run.gather(torch.cat([batch.cpu() for batch in loader])).reshape(run.num_processes, -1)
        places = mesh.data_ranks()
        assert all(
            torch.equal(own, everyones[places.index(place)]) for own, place in zip(everyones, places, strict=True)
        )


@scenario
def an_evaluation_before_the_step_changes_nothing(sizes: dict[str, int], schedule: str, folder: str) -> None:
    import torch

    run = accelerator(sizes, stages={"schedule": schedule})
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain = sgd(expected)
    for inputs, targets in batches(steps=3):
        run.train_batch(share_of(run, inputs), square, share_of(run, targets))
        run.eval_batch(share_of(run, inputs))
        loss_of(expected, inputs, targets).backward()
        norm = run.clip_grad_norm_(model.parameters(), 0.2)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.2), rtol=1e-5, atol=0)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    same_weights(run, model, expected)
    teacher = run.prepare_model(network(), evaluation_mode=True)
    torch.testing.assert_close(run.eval_batch(inputs, model=teacher).outputs, network()(inputs).detach())
    with pytest.warns(UserWarning, match="models in stages, need all processes"), run.join_uneven_inputs([model]):
        pass


@scenario
def trains_in_bf16(sizes: dict[str, int], schedule: str, folder: str) -> None:
    import torch

    run = accelerator(sizes, stages={"schedule": schedule}, mixed_precision="bf16")
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain = sgd(expected)
    for inputs, targets in batches(steps=4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(expected, inputs, targets)
        loss.backward()
        plain.step()
        plain.zero_grad()
    trained(run, model, optimizer, batches(steps=4))
    state = run.get_state_dict(model)
    if run.is_main_process:
        for name, value in expected.state_dict().items():
            assert state[name].dtype == torch.float32
            torch.testing.assert_close(state[name], value, rtol=0.05, atol=0.01)


def run_scenarios(sizes: dict[str, int], schedule: str, backend: str, folder: str) -> dict[str, str]:
    return failures_of(SCENARIOS, backend, sizes, schedule, folder)


@pytest.mark.parametrize(
    ("mesh", "schedule", "backend"),
    [
        ("stages", "1f1b", "shm"),
        pytest.param("stages", "gpipe", "gloo", marks=pytest.mark.long),
        pytest.param("stages", "zero_bubble", "shm", marks=pytest.mark.long),
        pytest.param("copies of stages", "1f1b", "shm", marks=pytest.mark.long),
        pytest.param("shards of stages", "interleaved", "shm", marks=pytest.mark.long),
        ("split stages", "1f1b", "shm"),
        pytest.param("copies of split stages", "1f1b", "shm", marks=pytest.mark.long),
        pytest.param("shards of split stages", "gpipe", "shm", marks=pytest.mark.long),
    ],
)
def test_processes_that_have_stages(mesh: str, schedule: str, backend: str, tmp_path: Path) -> None:
    sizes = MESHES[mesh]
    failures = run_processes(run_scenarios, num_processes(sizes), sizes, schedule, backend, str(tmp_path), timeout=500)
    assert failures == [{}] * num_processes(sizes), "\n".join(text for own in failures for text in own.values())
