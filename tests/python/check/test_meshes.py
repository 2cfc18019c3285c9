"""What a check says of the mesh of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.check.journal import of_kind, read_journals
from accelerate_cpp.check.meshes import judge_mesh, write_down_mesh
from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.task import Task
from accelerate_cpp.comm.mesh import Mesh

SIZES = {"pp": 2, "dp_replicate": 2, "tp": 2}


def record(weights: int = 1024, states: int = 2048, **sizes: int) -> list[dict[str, Any]]:
    return [{"kind": "mesh", "sizes": sizes or SIZES, "weights": weights, "states": states}]


def said(machines: int, *ranks: list[dict[str, Any]]) -> str:
    task = Task("train.py", processes=len(ranks), configured=8, settings={"num_machines": (machines, "--num_machines")})
    return " ".join(one.what for one in judge_mesh(task, dict(enumerate(ranks))))


def test_ranks_that_hold_the_same_are_named_together() -> None:
    shown = said(1, record(), record(512), record(), record(512))
    assert shown == (
        "the mesh is pp 2 x dp_replicate 2 x tp 2. ranks 0, 2: 1.00 KiB of weights and 2.00 KiB of optimizer states; "
        "ranks 1, 3: 512 B of weights and 2.00 KiB of optimizer states. All ranks are on one host"
    )


@pytest.mark.parametrize(
    ("machines", "where"),
    [
        (2, "On 2 machines with 4 ranks each, along pp ranks communicate between hosts, along dp_replicate, tp within"),
        (4, "On 4 machines with 2 ranks each, along pp, dp_replicate ranks communicate between hosts, along tp within"),
    ],
)
def test_axes_that_leave_a_host_are_named(machines: int, where: str) -> None:
    assert where in said(machines, record(), record())


def test_nothing_is_said_if_a_rank_did_not_come_that_far_or_has_another_mesh() -> None:
    assert said(1, record(), []) == ""
    assert said(1, record(), record(tp=2)) == ""


def test_bytes_are_those_of_different_tensors(observed: Observed, tmp_path: Path) -> None:
    accelerator = observed.accelerators[0]
    accelerator._session.topology.mesh = Mesh(0, {"tp": 2})
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    accelerator._models, accelerator._optimizers = [torch.nn.Sequential(layer, layer)], [optimizer]
    write_down_mesh(observed)
    (found,) = of_kind(read_journals(tmp_path)[0], "mesh")
    assert (found["sizes"], found["weights"], found["states"]) == ({"tp": 2}, 40, 40)


def test_copies_alone_are_no_mesh_to_speak_of(observed: Observed, tmp_path: Path) -> None:
    observed.accelerators[0]._session.topology.mesh = Mesh(0, {"dp_replicate": 2})
    write_down_mesh(observed)
    assert of_kind(read_journals(tmp_path)[0], "mesh") == []
