"""A run that asks for its copies of the model by name, in two real processes."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: each runs in a process of its own, and the collecting one needs none of it.


def scenarios(backend: str) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator, InitProcessGroupKwargs, ParallelismConfig

    group = InitProcessGroupKwargs(backend=backend)
    own = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2), kwargs_handlers=[group])
    mesh, model = own.torch_device_mesh, torch.nn.Linear(1, 1)
    prepared, loader = own.prepare(model, DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    prepared(torch.full((1, 1), float(own.process_index))).sum().backward()
    refused = ""
    try:
        Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=3))
    except ValueError as error:
        refused = str(error)
    return {
        "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.device_type),
        "joint": mesh["dp"].size(),
        "places": (own.data_parallel_rank, own.data_parallel_shard_rank, own.tensor_parallel_rank),
        "distributed": isinstance(prepared, DistributedDataParallel),
        "gradient": model.weight.grad.item(),
        "batches": [batch.tolist() for batch in loader],
        "summed": own.reduce(torch.tensor(1.0)).item(),
        "refused": refused,
    }


@pytest.mark.parametrize("backend", ["nccl", "gloo"], ids=["default", "gloo"])
def test_one_copy_per_process_is_plain_data_parallelism(backend: str) -> None:
    zero, one = run_processes(scenarios, 2, backend)
    assert zero["mesh"] == one["mesh"] == (("dp_replicate",), [0, 1], "cpu")
    assert zero["joint"] == one["joint"] == 2
    assert (zero["places"], one["places"]) == ((0, 0, 0), (1, 0, 0))
    assert zero["distributed"]
    assert zero["gradient"] == one["gradient"] == 0.5
    assert (zero["batches"], one["batches"]) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert zero["summed"] == 2.0
    assert "dp_replicate_size is 3, but there are 2 processes" in zero["refused"]
