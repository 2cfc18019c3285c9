"""Models whose layers are split over processes train as one process on the whole batch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshes import (
    TOKENS,
    accelerator,
    batches,
    block_of,
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
    "split": {"tp_size": 2},
    "copies of split layers": {"dp_replicate_size": 2, "tp_size": 2},
    "shards of split layers": {"dp_shard_size": 2, "tp_size": 2},
    "copies of shards of split layers": {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
}
SCENARIOS: dict[str, Callable[..., None]] = {}


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def trains_and_clips_as_one_process(sizes: dict[str, int], folder: str) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    run = accelerator(sizes)
    assert run.tensor_parallel_rank == run.process_index % 2
    model, expected = network(), network()
    if not run.is_main_process:
        torch.nn.init.zeros_(model[0].weight)  # all start from rank 0
        torch.nn.init.zeros_(model[1].fc1.weight)
    model, optimizer = run.prepare(model, sgd(model))
    weight = model[1].attention.q_proj.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().numel() * run.num_processes // sizes.get("dp_replicate_size", 1) == weight.numel()
    plain, _ = one_process(expected, batches(), max_norm=0.4)
    assert max(norm for _, norm in plain) > 0.4
    same(several(run, model, optimizer, batches(), max_norm=0.4), plain)
    same_weights(run, model, expected)


@scenario
def accumulates_as_one_process(sizes: dict[str, int], folder: str) -> None:
    run = accelerator(sizes, gradient_accumulation_steps=2)
    expected = network()
    model, optimizer = run.prepare(model := network(), sgd(model))
    plain = sgd(expected)
    for number, (inputs, targets) in enumerate(batches(steps=6), 1):
        (loss_of(expected, inputs, targets) / 2).backward()
        if number % 2 == 0:
            plain.step()
            plain.zero_grad()
        with run.accumulate(model):
            run.backward(loss_of(model, share_of(run, inputs), share_of(run, targets)))
            optimizer.step()
            optimizer.zero_grad()
    same_weights(run, model, expected)


@scenario
def loaders_give_the_same_batches_to_processes_that_split_layers(sizes: dict[str, int], folder: str) -> None:
    import torch

    run = accelerator(sizes)
    data = torch.arange(16).reshape(16, 1)
    loader = run.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    found = [batch.flatten().tolist() for batch in loader]
    mesh = run._session.topology.mesh
    whole = data.flatten().reshape(-1, mesh.data_size, 2)
    assert found == whole[:, mesh.data_rank].tolist()
    gathered = torch.cat([run.gather_for_metrics(batch) for batch in loader])
    assert gathered.flatten().tolist() == list(range(16))
    assert run.gather_for_metrics([str(mesh.data_rank)]) == [str(rank) for rank in range(mesh.data_size)]


@scenario
def goes_on_from_checkpoints_also_as_copies(sizes: dict[str, int], folder: str) -> None:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    run = accelerator(sizes)
    model, optimizer = run.prepare(model := network(), sgd(model))
    several(run, model, optimizer, batches())
    run.save_state(f"{folder}/c")
    expected = network()
    _, plain = one_process(expected, batches())
    then, _ = one_process(expected, batches(100, 3), plain)
    several(run, model, optimizer, batches(50, 2))
    run.load_state(f"{folder}/c")
    same(several(run, model, optimizer, batches(100, 3)), then)
    same_weights(run, model, expected)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    other = Accelerator(cpu=True)
    copies, optimizer = other.prepare(copies := network(), sgd(copies))
    other.load_state(f"{folder}/c")
    same(several(other, copies, optimizer, batches(100, 3)), then)


@scenario
def every_epoch_is_shuffled_alike_for_processes_that_split_layers(sizes: dict[str, int], folder: str) -> None:
    import torch

    for options in ({}, {"use_seedable_sampler": True}):
        from accelerate_cpp.utils import DataLoaderConfiguration

        run = accelerator(sizes, dataloader_config=DataLoaderConfiguration(**options))  # type: ignore[arg-type]
        torch.manual_seed(run.process_index)
        loader = run.prepare(torch.utils.data.DataLoader(range(16), batch_size=2, shuffle=True))  # type: ignore[arg-type]
        for _ in range(3):
            torch.rand(run.process_index)  # one process draws more numbers than another
            found = torch.cat([batch.cpu() for batch in loader])
            everyones = run.gather(found).reshape(run.num_processes, -1)
            assert torch.equal(everyones[0::2], everyones[1::2])


@scenario
def dispatched_batches_reach_the_processes_that_split_layers(sizes: dict[str, int], folder: str) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(14))

    run = accelerator(sizes)
    mesh = run._session.topology.mesh
    loader = run.prepare(DataLoader(Stream(), batch_size=2))
    gathered = torch.cat([run.gather_for_metrics(batch) for batch in loader])
    assert gathered.tolist() == list(range(14))
    rows = torch.arange(16).reshape(-1, mesh.data_size, 2)[:, mesh.data_rank]
    found = [batch.tolist() for batch in loader]
    assert found[0] == rows[0].tolist()


@scenario
def a_forward_pass_before_the_step_changes_nothing(sizes: dict[str, int], folder: str) -> None:
    import torch

    run = accelerator(sizes)
    model, expected = network(), network()
    model, optimizer = run.prepare(model, sgd(model))
    plain = sgd(expected)
    for inputs, targets in batches(steps=3):
        run.backward(loss_of(model, share_of(run, inputs), share_of(run, targets)))
        loss_of(expected, inputs, targets).backward()
        with torch.no_grad():
            model(share_of(run, inputs))
        norm = run.clip_grad_norm_(model.parameters(), 0.2)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.2), rtol=1e-5, atol=0)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    same_weights(run, model, expected)
    run.backward(loss_of(model, share_of(run, inputs), share_of(run, targets)))
    run.clip_grad_value_(model.parameters(), 1e-3)
    gradients = [one.grad for one in model.parameters()]
    largest = [float(getattr(one, "to_local", lambda one=one: one)().abs().max()) for one in gradients]
    assert max(largest) == pytest.approx(1e-3, rel=1e-6)


@scenario
def what_is_frozen_and_buffers_start_from_rank_0(sizes: dict[str, int], folder: str) -> None:
    import torch
    from torch import nn

    run = accelerator(sizes)
    torch.manual_seed(run.process_index)
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), *network()[3])
    model[0].requires_grad_(False)
    model[1].running_mean += run.process_index
    model = run.prepare(model)
    for tensor in (model[0].weight, model[1].running_mean, model[1].weight):
        own = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().detach()
        everyones = run.gather(own[None])
        assert torch.equal(everyones, everyones[:1].expand_as(everyones))


@scenario
def layers_that_the_program_has_split_are_shared_out_too(sizes: dict[str, int], folder: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    run = accelerator(sizes)
    assert run.torch_device_mesh is not None
    model, expected = network(), network()
    plan = {f"{block}.fc1": ColwiseParallel() for block in (1, 2)} | {
        f"{block}.fc2": RowwiseParallel() for block in (1, 2)
    }
    parallelize_module(model, run.torch_device_mesh["tp"], plan)
    model, optimizer = run.prepare(model, sgd(model))
    plain, _ = one_process(expected, batches(steps=3))
    same(several(run, model, optimizer, batches(steps=3)), plain)
    same_weights(run, model, expected)


@scenario
def an_optimizer_that_is_prepared_apart_steps(sizes: dict[str, int], folder: str) -> None:
    run = accelerator(sizes)
    model, expected = network(), network()
    optimizer = sgd(model)
    model = run.prepare_model(model)
    optimizer = run.prepare_optimizer(optimizer)
    plain, _ = one_process(expected, batches(steps=3))
    same(several(run, model, optimizer, batches(steps=3)), plain)
    same_weights(run, model, expected)


@scenario
def trains_in_bf16(sizes: dict[str, int], folder: str) -> None:
    import torch

    run = accelerator(sizes, mixed_precision="bf16")
    model, optimizer = run.prepare(model := network(), sgd(model))
    expected = network()
    plain = sgd(expected)
    for inputs, targets in batches(steps=4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(expected, inputs, targets)
        loss.backward()
        plain.step()
        plain.zero_grad()
    several(run, model, optimizer, batches(steps=4))
    state = run.get_state_dict(model)
    if run.is_main_process:
        for name, value in expected.state_dict().items():
            assert state[name].dtype == torch.float32
            torch.testing.assert_close(state[name], value, rtol=0.05, atol=0.01)


@scenario
def computes_between_split_layers_for_its_tokens(sizes: dict[str, int], folder: str) -> None:
    import torch

    run = accelerator(sizes, cuts=True, gradient_accumulation_steps=2)
    model, expected = network(), network()
    model, optimizer = run.prepare(model, sgd(model))
    seen: list[Any] = []
    model[1].norm.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    plain = sgd(expected)
    for number, (inputs, targets) in enumerate(batches(), 1):
        wanted = loss_of(expected, inputs, targets)
        (wanted / 2).backward()
        with run.accumulate(model):
            loss = loss_of(model, share_of(run, inputs), share_of(run, targets))
            run.backward(loss)
            norm = run.clip_grad_norm_(model.parameters(), 0.3) if run.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(run.reduce(loss.detach(), "mean"), wanted.detach(), rtol=1e-5, atol=1e-7)
        if number % 2 == 0:
            plain_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            torch.testing.assert_close(torch.as_tensor(norm), plain_norm, rtol=1e-5, atol=1e-7)
            plain.step()
            plain.zero_grad()
    assert seen[0][1] == TOKENS // 2
    same_weights(run, model, expected)
    with pytest.raises(ValueError, match=r"shape \(2, 5, 16\); expected .* divisible by tp_size=2"):
        model(torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match=r"the split layers of Sequential are not in blocks that follow each other"):
        accelerator(sizes, plan={"1.attention.o_proj": "rowwise", "3.2": "rowwise"}, cuts=True).prepare(network())


@scenario
def splits_as_a_plan_says(sizes: dict[str, int], folder: str) -> None:
    run = accelerator(sizes, plan={"*.fc1": "colwise", "*.fc2": "rowwise", "3.2": "colwise_gather_output"})
    model, optimizer = run.prepare(model := network(), sgd(model))
    assert model[1].attention.num_heads == 4  # which the plan leaves whole
    expected = network()
    plain, _ = one_process(expected, batches())
    same(several(run, model, optimizer, batches()), plain)


@scenario
def what_does_not_fit_is_refused_with_the_name_of_the_layer(sizes: dict[str, int], folder: str) -> None:
    import torch
    from torch import nn

    odd = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0' has out_features=3, which is not divisible by tp_size=2"):
        accelerator(sizes).prepare(odd)
    three_heads = nn.Sequential(block_of(12, 3, 3))
    with pytest.raises(ValueError, match=r"'0.attention.q_proj' computes 3 heads, .* tp_size=2"):
        accelerator(sizes).prepare(three_heads)
    with pytest.raises(ValueError, match=r"Linear has no layer that tp_size=2 could split"):
        accelerator(sizes).prepare(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"the plan has 'nothing', but Sequential has no such module"):
        accelerator(sizes, plan={"nothing": "colwise"}).prepare(network())
    with pytest.raises(ValueError, match=r"the plan splits '1.norm', a LayerNorm"):
        accelerator(sizes, plan={"1.norm": "colwise"}).prepare(network())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"'0' and '2' share a parameter"):
        accelerator(sizes, plan={"0": "colwise"}).prepare(tied)
    assert torch.distributed.get_world_size() == num_processes(sizes)


@scenario
def torchs_own_encoder_is_split(sizes: dict[str, int], folder: str) -> None:
    import torch
    from torch import nn

    def encoder() -> Any:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 2))

    run = accelerator(sizes)
    model, expected = encoder(), encoder()
    model, optimizer = run.prepare(model, sgd(model))
    plain, _ = one_process(expected, batches())
    same(several(run, model, optimizer, batches()), plain)
    with torch.no_grad():
        inputs = batches()[0][0]
        torch.testing.assert_close(model.eval()(inputs), expected.eval()(inputs), rtol=1e-5, atol=1e-6)


def run_scenarios(sizes: dict[str, int], backend: str, folder: str) -> dict[str, str]:
    return failures_of(SCENARIOS, backend, sizes, folder)


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        ("split", "shm"),
        pytest.param("split", "gloo", marks=pytest.mark.long),
        ("copies of split layers", "shm"),
        pytest.param("shards of split layers", "shm", marks=pytest.mark.long),
        pytest.param("copies of shards of split layers", "shm", marks=pytest.mark.long),
    ],
)
def test_processes_that_split_layers(mesh: str, backend: str, tmp_path: Path) -> None:
    sizes = MESHES[mesh]
    failures = run_processes(run_scenarios, num_processes(sizes), sizes, backend, str(tmp_path), timeout=500)
    assert failures == [{}] * num_processes(sizes), "\n".join(text for own in failures for text in own.values())
