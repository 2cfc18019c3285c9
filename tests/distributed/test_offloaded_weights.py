"""Processes of a host share one copy of offloaded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

WIDTH, LAYERS = 512, 4  # 4 MiB


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def mapped(of: Callable[[str, range], bool]) -> dict[str, int]:
    """Kilobytes of this process's mappings for whose line and addresses ``of`` is true: all, and its share of them."""
    found = {"Rss": 0, "Pss": 0, "files": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(":")[0]
        if "-" in line.split(" ")[0]:
            begin, end = line.split(" ")[0].split("-")
            ours = of(line, range(int(begin, 16), int(end, 16)))
            found["files"] += ours
        elif ours and first in ("Rss", "Pss"):
            found[first] += int(line.split()[1])
    return found


def offload_to_one_folder(folder: str) -> dict[str, int]:
    import torch

    from accelerate_cpp import Accelerator, disk_offload

    accelerator = Accelerator(cpu=True)
    expected = model()(torch.ones(1, WIDTH))
    offloaded = disk_offload(model(), folder, execution_device="cpu")
    assert torch.equal(offloaded(torch.ones(1, WIDTH)), expected)
    accelerator.wait_for_everyone()
    memory = mapped(lambda line, _: ".weight.dat" in line)
    accelerator.wait_for_everyone()
    return memory


def test_processes_that_offload_to_one_folder_map_the_same_files(tmp_path: Path) -> None:
    for value in run_processes(offload_to_one_folder, 2, str(tmp_path / "off")):
        assert value["files"] == LAYERS
        assert value["Rss"] >= WIDTH * WIDTH * 4 * LAYERS // 1024
        assert value["Pss"] <= value["Rss"] * 0.55, "half of it is the other's"


def share_weights() -> dict[str, int]:
    import torch

    from accelerate_cpp import Accelerator, cpu_offload
    from accelerate_cpp.utils import share_on_host

    accelerator = Accelerator(cpu=True)
    trained = model()
    if accelerator.process_index == 1:
        for parameter in trained.parameters():
            parameter.data.zero_()  # the values are those of the first process
    weights = share_on_host({**trained.state_dict(), "empty": torch.empty(0, 3), "number": torch.tensor(7)})
    assert int(weights["number"]) == 7
    assert weights["empty"].shape == (0, 3)
    with torch.device("meta"):
        empty = model()
    offloaded = cpu_offload(empty, execution_device="cpu", state_dict=weights)
    assert torch.equal(offloaded(torch.ones(1, WIDTH)), model()(torch.ones(1, WIDTH)))
    accelerator.wait_for_everyone()
    memory = mapped(lambda _, addresses: weights["0.weight"].data_ptr() in addresses)
    accelerator.wait_for_everyone()
    weights["0.weight"].fill_(accelerator.process_index)
    accelerator.wait_for_everyone()
    assert float(weights["0.weight"].mean()) == accelerator.process_index, "each process changes its own"
    return memory


def test_weights_in_memory_are_there_once_for_a_host() -> None:
    for value in run_processes(share_weights, 2):
        assert value["files"] == 1
        assert value["Rss"] >= WIDTH * WIDTH * 4 * LAYERS // 1024
        assert value["Pss"] <= value["Rss"] * 0.55, "half of it is the other's"


def share_what_differs(how: str) -> str:
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import InvalidArgument
    from accelerate_cpp.utils import share_on_host

    rank = Accelerator(cpu=True).process_index
    weights = {"a": torch.ones(3), "b": torch.ones(4)}
    if rank == 1 and how == "shape":
        weights["b"] = torch.ones(5)
    if rank == 1 and how == "number":
        del weights["b"]
    if rank == 1 and how == "values":
        weights["b"] = torch.empty(4, device="meta")
    if rank == 1 and how == "layout":
        weights["b"] = torch.ones(4).to_sparse()
    with pytest.raises(InvalidArgument) as raised:
        share_on_host(weights)
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", "processes 0 and 1 have different weights, first 'b'"),
        ("number", "processes 0 and 1 have different weights, first the number of tensors"),
        ("values", "'b' of process 1 is no dense tensor with values"),
        ("layout", "'b' of process 1 is no dense tensor with values"),
    ],
)
def test_weights_that_differ_are_refused_on_all_processes(how: str, message: str) -> None:
    for value in run_processes(share_what_differs, 2, how):
        assert message in value
