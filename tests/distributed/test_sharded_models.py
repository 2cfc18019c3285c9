"""Models that are sharded before they are prepared, in two real processes over shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.

KINDS = ["fully_shard", "FullyShardedDataParallel", "tensor parallel"]
ROWS, STEPS = 4, 3


def network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def sharded(kind: str, frozen: bool = False) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = network().requires_grad_(not frozen), init_device_mesh("cpu", (2,))
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    if kind == "FullyShardedDataParallel":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def prepared(kind: str) -> dict[str, Any]:
    import torch

    from accelerate_cpp import Accelerator

    own = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for name, model in (("whole", sharded(kind)), ("part", torch.nn.Sequential(sharded(kind), torch.nn.Linear(2, 1)))):
        try:
            own.prepare(model)
        except ValueError as error:
            found[name] = str(error)
    found["kept"] = len(own._models)
    model, inputs = sharded(kind), torch.ones(1, 3)
    evaluated = own.prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        outputs = evaluated(inputs)
        expected = network()(inputs)
    found["evaluated"] = (evaluated is model, torch.allclose(outputs, expected, atol=1e-6))
    frozen = sharded(kind, frozen=True)
    found["frozen"] = own.prepare(frozen) is frozen
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_sharded_is_refused_for_training_and_comes_back_otherwise(kind: str) -> None:
    for found in run_processes(prepared, 2, kind):
        name = "'0.weight' is a DTensor" if kind == "tensor parallel" else "by FSDP"
        assert "is already sharded" in found["whole"]
        assert name in found["whole"]
        assert "Sequential is already sharded" in found["part"]
        assert (found["kept"], found["evaluated"], found["frozen"]) == (0, (True, True), True)


def batches(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    import torch

    torch.manual_seed(1)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return [(torch.randn(ROWS, 3)[rows], torch.randn(ROWS, 2)[rows]) for _ in range(STEPS)]


def trained(folder: str) -> dict[str, Any]:
    """A model that ``fully_shard`` averages, whose optimizer alone is prepared, as the refusal says."""
    import torch

    from accelerate_cpp import Accelerator

    own = Accelerator(cpu=True)
    model = sharded("fully_shard")
    optimizer = own.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    norms = []
    for inputs, targets in batches(own.process_index, own.num_processes):
        own.backward((model(inputs) - targets).square().mean())
        norms.append(own.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    try:
        own.save_state(folder)
    except RuntimeError as error:
        saved = str(error)
    values = [value for weight in model.parameters() for value in weight.full_tensor().flatten().tolist()]
    return {"values": values, "norms": norms, "saved": saved}


def trained_alone() -> dict[str, Any]:
    """The same in plain torch on all rows."""
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for inputs, targets in batches(0, 1):
        (model(inputs) - targets).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"values": [value for weight in model.parameters() for value in weight.flatten().tolist()], "norms": norms}


def test_without_being_prepared_it_trains_as_one_process_does_and_no_shard_is_saved_for_the_whole(
    tmp_path: Path,
) -> None:
    (expected,) = run_processes(trained_alone, 1)
    for found in run_processes(trained, 2, str(tmp_path / "c")):
        assert found["values"] == pytest.approx(expected["values"], rel=1e-4, abs=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert "optimizer.bin would contain the shard of only one process" in found["saved"]
    assert not (tmp_path / "c").exists()
