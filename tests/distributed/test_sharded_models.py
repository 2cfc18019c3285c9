"""Models that are sharded before they are prepared train as one process on the whole batch does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes
from scenarios import failures_of

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

OF_VERSION_2 = [
    "fully_shard",
    "fully_shard of the layers",
    "fully_shard, freed after the forward pass",
    "fully_shard of a part",
]
OF_VERSION_1 = [
    "FullyShardedDataParallel",
    "FullyShardedDataParallel, flat",
    "FullyShardedDataParallel of a part",
]
OF_TENSORS = ["tensor parallel", "sequence parallel"]
OF_FOUR = ["copies of shards", "shards of split layers"]
ROWS, STEPS, MICRO_BATCHES = 8, 5, 2


def network() -> Any:
    import torch

    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(3, 8),
        torch.nn.Tanh(),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 6),
        torch.nn.Linear(6, 2),
    )
    return torch.nn.Sequential(*layers)


def sharded(kind: str) -> Any:
    """The network as a program shares it out among all processes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = network()
    if kind in OF_FOUR:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        if kind == "copies of shards":
            return fully_shard(model, mesh=mesh)
        parallelize_module(model, mesh["inner"], {"3": ColwiseParallel(), "4": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["outer"])
    if kind in OF_VERSION_1:
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": "flat" not in kind}
        if "part" not in kind:
            return FullyShardedDataParallel(model, **options)
        model[3] = FullyShardedDataParallel(model[3], **options)
        return model
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    if kind == "tensor parallel":
        return parallelize_module(model, mesh, {"3": ColwiseParallel(), "4": RowwiseParallel()})
    if kind == "sequence parallel":
        rows = ColwiseParallel(input_layouts=Shard(0))
        parallelize_module(model, mesh, {"2": SequenceParallel(sequence_dim=0), "3": rows, "4": RowwiseParallel()})
        whole_to_rows = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(0),)}
        model[1] = parallelize_module(model[1], mesh, PrepareModuleInput(**whole_to_rows, use_local_output=True))
        return model
    for layer in {"fully_shard of the layers": (0, 2, 3, 4), "fully_shard of a part": (3,)}.get(kind, ()):
        fully_shard(model[layer], mesh=mesh)
    if kind != "fully_shard of a part":
        fully_shard(model, mesh=mesh, reshard_after_forward=True if "freed" in kind else None)
    return model


def accelerator(**arguments: Any) -> Any:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **arguments)


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches(begin: int = 0, steps: int = STEPS) -> list[tuple[Any, Any]]:
    """The micro-batches of all processes together."""
    import torch

    generators = [torch.Generator().manual_seed(begin + number) for number in range(steps * MICRO_BATCHES)]
    return [(torch.randn(ROWS, 3, generator=one), torch.randn(ROWS, 2, generator=one)) for one in generators]


def share_of(run: Any, kind: str, rows: Any) -> Any:
    """Those of this process; processes that split layers get the same."""
    if kind in OF_TENSORS:
        return rows
    if kind == "shards of split layers":
        return rows.tensor_split(2)[run.process_index // 2]
    return rows.tensor_split(run.num_processes)[run.process_index]


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return (model(inputs) - targets).square().mean()


def one_process(model: Any, optimizer: Any, data: list[tuple[Any, Any]], max_norm: float | None = None) -> list[float]:
    """Plain torch: the norms of the gradients."""
    import torch

    norms = []
    for number, batch in enumerate(data, 1):
        (loss_of(model, *batch) / MICRO_BATCHES).backward()
        if number % MICRO_BATCHES == 0:
            if max_norm is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def several(
    run: Any, kind: str, model: Any, optimizer: Any, data: list[tuple[Any, Any]], max_norm: float | None = None
) -> list[float]:
    norms = []
    for batch in data:
        with run.accumulate(model):
            run.backward(loss_of(model, *(share_of(run, kind, rows) for rows in batch)))
            if max_norm is not None and run.sync_gradients:
                norms.append(run.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def same_weights(run: Any, model: Any, expected: Any, rtol: float = 1e-5) -> None:
    import torch

    state = run.get_state_dict(model)
    if not run.is_main_process:
        assert state == {}
        return
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=1e-6, msg=name)


SCENARIOS: dict[str, Callable[[str, str], None]] = {}


def scenario(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def accumulates_clips_and_steps_as_one_process(kind: str, folder: str) -> None:
    import torch

    run = accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model, expected = sharded(kind), network()
    own, optimizer = list(model.parameters()), sgd(model)
    with torch.no_grad():
        model(batches()[0][0])  # after which roots of fully_shard have their parameters whole
    prepared, optimizer = run.prepare(model, optimizer)
    assert prepared is model
    assert all(ours is given for ours, given in zip(prepared.parameters(), own, strict=True))
    plain_norms = one_process(expected, sgd(expected), batches(), max_norm=0.3)
    norms = several(run, kind, model, optimizer, batches(), max_norm=0.3)
    torch.testing.assert_close(norms, plain_norms, rtol=1e-5, atol=1e-7)
    assert max(plain_norms) > 0.3  # some are clipped
    same_weights(run, model, expected)


@scenario
def clips_by_other_norms(kind: str, folder: str) -> None:
    import torch

    for norm_type in (1.0, float("inf")):
        run = accelerator()
        model, expected = run.prepare(sharded(kind)), network()
        batch = batches()[0]
        run.backward(loss_of(model, *(share_of(run, kind, rows) for rows in batch)))
        loss_of(expected, *batch).backward()
        norm = run.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        plain = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm.item(), plain.item(), rtol=1e-5, atol=1e-7)


@scenario
def clips_what_one_process_has_no_part_of(kind: str, folder: str) -> None:
    import torch

    if kind == "FullyShardedDataParallel, flat":
        return  # its layers are one parameter
    run = accelerator()
    model, expected = run.prepare(sharded(kind)), network()
    batch = batches()[0]
    run.backward(loss_of(model, *(share_of(run, kind, rows) for rows in batch)))
    loss_of(expected, *batch).backward()
    first, plain = (list(one.parameters())[:1] for one in (model, expected))
    norm, plain_norm = run.clip_grad_norm_(first, 0.01), torch.nn.utils.clip_grad_norm_(plain, 0.01)
    torch.testing.assert_close(norm.item(), plain_norm.item(), rtol=1e-5, atol=1e-7)


@scenario
def only_the_last_pass_of_a_step_reduces(kind: str, folder: str) -> None:
    import torch

    run = accelerator(gradient_accumulation_steps=2)
    if kind in (*OF_TENSORS, "shards of split layers"):
        return  # their layers reduce activations in each pass
    model = run.prepare(sharded(kind))
    reductions = []
    for batch in batches()[:2]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler, run.accumulate(model):
            run.backward(loss_of(model, *(share_of(run, kind, rows) for rows in batch)))
        names = [event.key for event in profiler.key_averages()]
        reductions.append([name for name in names if name.startswith("c10d::") and "reduce" in name])
    assert reductions[0] == []
    assert reductions[1] != []


@scenario
def sums_are_divided_by_their_weights(kind: str, folder: str) -> None:
    run = accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model, expected = sharded(kind), network()
    model, optimizer = run.prepare(model, sgd(model))
    plain = sgd(expected)
    data = batches()
    for begin in range(0, len(data), MICRO_BATCHES):
        total = 0
        for number, (inputs, targets) in enumerate(data[begin : begin + MICRO_BATCHES]):
            # Shares differ in size, except where layers cannot divide their rows unevenly.
            kept = ROWS - 2 * (number + 1) if kind == "sequence parallel" else ROWS - 1 - 2 * number
            inputs, targets = inputs[:kept], targets[:kept]
            total += kept
            (expected(inputs) - targets).square().sum().backward()
            with run.accumulate(model):
                own = [share_of(run, kind, rows) for rows in (inputs, targets)]
                run.backward((model(own[0]) - own[1]).square().sum(), weight=len(own[0]))
                optimizer.step()
                optimizer.zero_grad()
        for weight in expected.parameters():
            weight.grad /= total
        plain.step()
        plain.zero_grad()
    same_weights(run, model, expected)


@scenario
def an_overflow_in_one_part_skips_the_step_on_all(kind: str, folder: str) -> None:
    import torch

    from accelerate_cpp.utils import GradScalerKwargs

    run = accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
    model, expected = sharded(kind), network()
    model, optimizer = run.prepare(model, sgd(model))
    inputs, targets = (share_of(run, kind, rows) for rows in batches()[0])
    run.backward(loss_of(model, inputs, targets))
    poisoned = [one for one in optimizer.param_groups[0]["params"] if one.grad is not None]
    if run.is_main_process:
        gradient: Any = poisoned[0].grad
        getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = torch.inf
    optimizer.step()
    assert optimizer.step_was_skipped
    same_weights(run, model, expected)
    optimizer.zero_grad()
    run.backward(loss_of(model, inputs, targets))
    optimizer.step()
    assert not optimizer.step_was_skipped


@scenario
def checkpoints_are_read_by_the_same_layout_and_by_plain_copies(kind: str, folder: str) -> None:
    import torch

    run = accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model = sharded(kind)
    model, optimizer = run.prepare(model, sgd(model))
    first, then = batches(0), batches(100)
    several(run, kind, model, optimizer, first)
    if kind in OF_VERSION_1:
        with pytest.raises(ValueError, match=r"save_state: .*flattened parameters"):
            run.save_state(f"{folder}/c")
        return
    run.save_state(f"{folder}/c")
    expected = network()
    plain = sgd(expected)
    one_process(expected, plain, [*first, *then])
    several(run, kind, model, optimizer, then)
    same_weights(run, model, expected)
    run.load_state(f"{folder}/c")
    several(run, kind, model, optimizer, then)
    same_weights(run, model, expected)
    other = accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    copies = network()
    copies, optimizer = other.prepare(copies, sgd(copies))
    other.load_state(f"{folder}/c")
    several(other, "copies", copies, optimizer, then)
    found = other.get_state_dict(copies)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@scenario
def a_pass_that_failed_is_forgotten(kind: str, folder: str) -> None:
    import torch

    if kind in OF_VERSION_1:
        return  # torch's wrapper expects no pass after it
    run = accelerator()
    model, expected = sharded(kind), network()
    model, optimizer = run.prepare(model, sgd(model))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any) -> Any:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("as asked")

    inputs, targets = (share_of(run, kind, rows) for rows in batches()[0])
    with pytest.raises(RuntimeError, match="as asked"):
        run.backward(loss_of(model, Fails.apply(inputs.requires_grad_()), targets))
    optimizer.zero_grad()
    one_process(expected, sgd(expected), batches()[:1] * 2)
    run.backward(loss_of(model, inputs.detach(), targets))
    optimizer.step()
    same_weights(run, model, expected)


@scenario
def beside_a_model_of_which_all_have_copies(kind: str, folder: str) -> None:
    import torch

    run = accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    if kind in (*OF_TENSORS, "shards of split layers"):
        return  # their batches are others than those of copies
    model, head = sharded(kind), torch.nn.Linear(2, 2)
    torch.manual_seed(5)
    expected = torch.nn.Sequential(network(), torch.nn.Linear(2, 2))
    head.load_state_dict(expected[1].state_dict())
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.2, momentum=0.9)
    model, head, optimizer = run.prepare(model, head, optimizer)
    for batch in batches():
        with run.accumulate(model, head):
            inputs, targets = (share_of(run, kind, rows) for rows in batch)
            run.backward((head(model(inputs)) - targets).square().mean())
            if run.sync_gradients:
                run.clip_grad_norm_([*model.parameters(), *head.parameters()], 0.3)
            optimizer.step()
            optimizer.zero_grad()
    one_process(expected, sgd(expected), batches(), max_norm=0.3)
    same_weights(run, model, expected[0])
    torch.testing.assert_close(run.get_state_dict(head)["weight"], expected[1].weight.detach(), rtol=1e-5, atol=1e-6)


@scenario
def states_are_whole_whatever_the_program_sets_in_the_wrapper(kind: str, folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    if kind not in OF_VERSION_1:
        return
    run = accelerator()
    model = run.prepare(sharded(kind))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    same_weights(run, model, network())


@scenario
def uneven_inputs_train_on_the_samples_that_there_are(kind: str, folder: str) -> None:
    import torch

    from accelerate_cpp import DataLoaderConfiguration
    from accelerate_cpp.data.cursor import cursor_of

    if kind in (*OF_TENSORS, "shards of split layers"):
        return  # their loaders are not prepared
    for stateful in (False, True):
        run = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
        model, expected = sharded(kind), network()
        round_of_all = 2 * run.num_processes
        torch.manual_seed(3)
        inputs, targets = torch.randn(2 * round_of_all + 1, 3), torch.randn(2 * round_of_all + 1, 2)
        data = torch.utils.data.TensorDataset(inputs, targets)
        model, optimizer, loader = run.prepare(model, sgd(model), torch.utils.data.DataLoader(data, batch_size=2))
        positions, ends = [], []
        with run.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                run.backward(loss_of(model, *batch))
                optimizer.step()
                optimizer.zero_grad()
                positions.append(cursor_of(loader)["position"])
                ends.append(loader.end_of_dataloader)
        assert (positions, ends) == ([1, 2, 0], [False, False, True])
        assert loader.iteration == 1
        plain = sgd(expected)
        for rows, labels in zip(inputs.split(round_of_all), targets.split(round_of_all), strict=True):
            loss_of(expected, rows, labels).backward()
            plain.step()
            plain.zero_grad()
        same_weights(run, model, expected)


@scenario
def evaluated_or_frozen_it_comes_back_as_it_is(kind: str, folder: str) -> None:
    import torch

    run = accelerator()
    model, inputs = sharded(kind), torch.ones(8, 3)
    assert run.prepare_model(model, evaluation_mode=True) is model
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), network()(inputs))
    frozen = sharded(kind).requires_grad_(False)
    assert run.prepare(frozen) is frozen


@scenario
def copies_of_what_is_not_sharded_start_from_those_of_rank_0(kind: str, folder: str) -> None:
    import torch

    if kind not in (*OF_TENSORS, "fully_shard of a part", "FullyShardedDataParallel of a part"):
        return
    run = accelerator()
    model = sharded(kind)
    with torch.no_grad():
        model[0].weight += run.process_index
    same_weights(run, run.prepare(model), network())
    torch.testing.assert_close(model[0].weight, network()[0].weight)


@scenario
def a_loader_is_prepared_where_processes_get_different_batches(kind: str, folder: str) -> None:
    import torch

    splits = kind in (*OF_TENSORS, "shards of split layers")
    for prepares in (True, False):
        run = accelerator()
        model, loader = run.prepare(sharded(kind)), torch.utils.data.DataLoader(torch.ones(32, 3), batch_size=8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in run.prepare(loader) if prepares else loader:
                run.backward(model(batch).sum())
        told = [str(one.message) for one in caught]
        assert any("compute with the same batches" in one for one in told) is (splits and prepares), told
        assert any("has not been prepared" in one for one in told) is (not splits and not prepares), told


@scenario
def what_needs_whole_models_refuses_it(kind: str, folder: str) -> None:
    from accelerate_cpp.local_sgd import LocalSGD

    run = accelerator()
    model = run.prepare(sharded(kind))
    with pytest.raises(ValueError, match="shared out among the processes"):
        LocalSGD(run, model, 2)


ALL_KINDS = [*OF_VERSION_2, *OF_VERSION_1, *OF_TENSORS]


def run_scenarios(kind: str, backend: str, folder: str) -> dict[str, str]:
    return failures_of(SCENARIOS, backend, kind, folder)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "shm") for kind in ALL_KINDS),
        (ALL_KINDS[0], "gloo"),
        *(pytest.param(kind, "gloo", marks=pytest.mark.long) for kind in ALL_KINDS[1:]),
    ],
)
def test_in_two_processes(kind: str, backend: str, tmp_path: Path) -> None:
    failures = run_processes(run_scenarios, 2, kind, backend, str(tmp_path), timeout=280)
    assert failures == [{}] * 2, "\n".join(text for own in failures for text in own.values())


@pytest.mark.parametrize("kind", [OF_FOUR[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in OF_FOUR[1:])])
def test_in_four_processes(kind: str, tmp_path: Path) -> None:
    failures = run_processes(run_scenarios, 4, kind, "shm", str(tmp_path), timeout=280)
    assert failures == [{}] * 4, "\n".join(text for own in failures for text in own.values())


def refused() -> list[str]:
    """Models over two of four processes each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    run = accelerator()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = mesh["inner"].get_group()
    device = torch.device("cpu")
    mixed = fully_shard(network()[:3], mesh=init_device_mesh("cpu", (4,)))
    models = [
        fully_shard(network(), mesh=mesh["inner"]),
        parallelize_module(network(), mesh["inner"], {"3": ColwiseParallel(), "4": RowwiseParallel()}),
        FullyShardedDataParallel(network(), process_group=group, device_id=device),
        torch.nn.Sequential(mixed, fully_shard(network()[3:], mesh=mesh["inner"])),
    ]
    messages = []
    for model in models:
        with pytest.raises(ValueError, match="nothing averages its gradients") as caught:
            run.prepare(model)
        messages.append(str(caught.value))
    assert run._models == []
    dist.barrier()
    return messages


def test_a_model_over_a_part_of_the_processes_is_refused() -> None:
    for messages in run_processes(refused, 4):
        assert all("is shared out over 2 of the 4 processes" in message for message in messages)
        assert "'3.weight' of Sequential" in messages[1]


def trained_without_being_prepared(folder: str) -> dict[str, Any]:
    run = accelerator()
    model, expected = sharded("fully_shard"), network()
    optimizer = run.prepare(sgd(model))
    norms, plain_norms = [], []
    plain = sgd(expected)
    for batch in batches():
        run.backward(loss_of(model, *(share_of(run, "fully_shard", rows) for rows in batch)))
        loss_of(expected, *batch).backward()
        norms.append(run.clip_grad_norm_(model.parameters(), 0.3).item())
        plain_norms.append(one_norm(expected, 0.3))
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    with pytest.raises(RuntimeError, match=r"optimizer\.bin would contain the shard of only one process"):
        run.save_state(folder)
    return {"norms": norms, "plain": plain_norms}


def one_norm(model: Any, max_norm: float) -> float:
    import torch

    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def test_without_being_prepared_it_trains_as_one_process_does_and_no_shard_is_saved_for_the_whole(
    tmp_path: Path,
) -> None:
    for found in run_processes(trained_without_being_prepared, 2, str(tmp_path / "c")):
        assert found["norms"] == pytest.approx(found["plain"], rel=1e-5)
    assert not (tmp_path / "c").exists()


def looked_at_before_steps(kind: str) -> tuple[list[float], list[float]]:
    """Losses of a loop that computes outputs between the backward pass and the step, and those of plain torch."""
    import torch

    run = accelerator()
    model = sharded(kind)
    model, optimizer = run.prepare(model, sgd(model))
    alone = network()
    plain = sgd(alone)
    found, wanted = [], []
    for inputs, targets in batches(steps=2):
        loss = loss_of(model, share_of(run, kind, inputs), share_of(run, kind, targets))
        run.backward(loss)
        whole = loss_of(alone, inputs, targets)
        whole.backward()
        with torch.no_grad():
            model(inputs)  # gathers weights once more
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
        found.append(run.reduce(loss.detach(), "mean").item())
        wanted.append(whole.item())
    return found, wanted


@pytest.mark.parametrize("kind", ["fully_shard of the layers", "fully_shard of a part"])
def test_weights_gathered_between_the_backward_pass_and_the_step_are_not_used_after_it(kind: str) -> None:
    for found, wanted in run_processes(looked_at_before_steps, 2, kind):
        assert found == pytest.approx(wanted, rel=1e-5)
