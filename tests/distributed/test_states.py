"""States that one process sends to all."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes


def received(backend: str) -> list[Any]:
    import torch

    from accelerate_cpp import InitProcessGroupKwargs, PartialState
    from accelerate_cpp.comm.states import broadcast_state

    rank = PartialState(cpu=True, **InitProcessGroupKwargs(backend=backend).to_kwargs()).process_index
    table = torch.arange(4096.0).reshape(64, 64).t() + rank
    state = {"large": table, "group": [{"lr": 0.1 * rank, "of": (table.bfloat16(), torch.tensor(rank))}], rank: None}
    found = broadcast_state(state if rank == 1 else {"none": torch.ones(9999)}, 1)
    large, (group,) = found["large"], found["group"]
    return [
        large.tolist() == (table - rank + 1).tolist(),
        group["lr"],
        group["of"][0].dtype,
        group["of"][1].item(),
        1 in found,
    ]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_processes_have_the_state_of_one(backend: str) -> None:
    import torch

    assert run_processes(received, 3, backend) == [[True, 0.1, torch.bfloat16, 1, True]] * 3
