"""Device maps in figures and as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.placement.map_table import Row, shortened, tabulate
from accelerate_cpp.placement.module_sizes import Measure
from accelerate_cpp.placement.workload import Needs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)


class Model(nn.Module):
    """An embedding that the head shares, and layers of 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


MAP: dict[str, Any] = {
    "embedding": 0,
    "head": 0,
    "layers.0": 0,
    "layers.1": 0,
    "layers.2.first": 0,
    "layers.2.second": "cpu",
    "layers.3": "cpu",
    "scale": "disk",
}
NOTHING = Needs({}, 0)


def test_the_text_has_all_devices_with_parts_bytes_shares_and_ties() -> None:
    table = tabulate(Model(), MAP, {0: 576, 1: 100, "cpu": 0, "disk": 10**6}, Measure(), NOTHING)
    assert table.text().splitlines() == [
        "Model: 400 B on 3 devices",
        "",
        "device  parts                                        weights  of max_memory",
        "0       embedding, head, layers.0-1, layers.2.first    288 B         50.0 %",
        "1       nothing                                          0 B          0.0 %",
        "cpu     layers.2.second, layers.3                       96 B              -",
        "disk    scale                                           16 B          0.0 %",
        "",
        "tied on 0: embedding.weight = head.weight",
    ]


@pytest.mark.parametrize("device", ["xla", torch.device("xla:0"), "mps"])
def test_a_device_without_a_number_is_shown_before_the_host(device: Any) -> None:
    name = str(device).partition(":")[0]
    table = tabulate(Model(), {"": device}, {"cpu": 800, name: 800}, Measure(), NOTHING)
    assert [(row.weights, row.room) for row in table.rows] == [(400, 800), (0, 800)]


def test_without_room_there_is_no_share_and_with_a_workload_a_column() -> None:
    needs = Needs({"layers.0": 7, "layers.2": 20, "layers.3": 30}, 1000)
    lines = tabulate(Model(), MAP, {}, Measure(torch.float16), needs).text().splitlines()
    assert lines[2].split() == ["device", "parts", "weights", "workload"]
    # What is offloaded runs on device 0.
    assert lines[3].split()[-4:] == ["144", "B", "1.03", "KiB"]
    assert [line.split()[-2] for line in lines[4:6]] == ["0", "0"]


def test_on_the_cpu_alone_what_is_held_is_there() -> None:
    table = tabulate(Model(), {"": "cpu"}, {}, Measure(), Needs({"layers.3": 30}, 1000))
    assert [(row.device, row.parts, row.held) for row in table.rows] == [("cpu", ["the whole model"], 30)]
    assert table.title == "Model: 400 B on 1 device"


def test_copies_of_a_tied_tensor_count_on_each_device() -> None:
    table = tabulate(Model(), {"": 0, "head": 1}, {}, Measure(), NOTHING)
    assert [row.weights for row in table.rows] == [400, 128]
    assert table.ties == ["tied, with a copy on each device: embedding.weight (0) = head.weight (1)"]


def test_devices_of_torch_are_those_of_max_memory() -> None:
    table = tabulate(Model(), {"": torch.device("cuda", 1), "scale": "cuda:0"}, {0: 32, 1: 768}, Measure(), NOTHING)
    assert [(row.device, row.share()) for row in table.rows] == [("cuda:0", "50.0 %"), ("cuda:1", "50.0 %")]


def test_blocks_are_layers_and_what_is_beside_them_with_their_bytes_on_each_device() -> None:
    rows = tabulate(Model(), MAP, {}, Measure(), NOTHING).rows
    assert [[(block.name, block.kind, block.size) for block in row.blocks] for row in rows] == [
        [
            ("embedding", "Embedding", 128),
            ("layers.0", "Layer", 64),
            ("layers.1", "Layer", 64),
            ("layers.2", "Layer", 32),
        ],
        [("layers.2", "Layer", 32), ("layers.3", "Layer", 64)],
        [("scale", "tensor", 16)],
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["a", "b.0", "b.1", "b.2", "c"], ["a", "b.0-2", "c"]),
        (["b.0", "b.2", "b.3", "c.4", "c.5"], ["b.0", "b.2-3", "c.4-5"]),
        (["b.9", "b.10", "b.8"], ["b.9-10", "b.8"]),
        (list("abcdefgh"), ["a", "b", "c", "d", "e", "f", "2 more"]),
    ],
)
def test_names_that_are_numbered_are_shortened(names: list[str], expected: list[str]) -> None:
    assert shortened(names) == expected


def test_a_device_of_unknown_room_has_no_share() -> None:
    assert Row("0", weights=5).share() == "-"
    assert Row("0", weights=5, held=5, room=40).share() == "25.0 %"
