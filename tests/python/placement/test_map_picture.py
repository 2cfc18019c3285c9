"""Device maps as a picture, and the public function for both."""

from __future__ import annotations

import importlib.util
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.placement import map_picture
from accelerate_cpp.placement.map_table import Block, MapTable, Row
from accelerate_cpp.utils import Workload, device_map_table


@pytest.fixture(autouse=True)
def _without_logs_of_absent_gpus() -> Iterator[None]:
    """The maps name GPUs that this machine need not have."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))


def size_of(png: Path) -> tuple[int, ...]:
    """Width and height in pixels, from the header of the file."""
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


MAP: dict[str, Any] = {"0": 0, "1": 1, "2": 1}


def test_the_table_is_text() -> None:
    assert device_map_table(model(), MAP, {0: 64, 1: "0.000192MB"}).splitlines() == [
        "Sequential: 128 B on 2 devices",
        "",
        "device  parts  weights  of max_memory",
        "0       0         32 B         50.0 %",
        "1       1-2       96 B         50.0 %",
    ]


def test_dtypes_and_workloads_count() -> None:
    workload = Workload(activation_bytes=16, class_bytes={"Linear": 8})
    options: dict[str, Any] = {"dtype": torch.float16, "special_dtypes": {"0.weight": torch.float64}}
    lines = device_map_table(model(), MAP, **options, workload=workload).splitlines()
    assert [line.split()[-4:] for line in lines[3:]] == [["64", "B", "24", "B"], ["48", "B", "32", "B"]]


def test_the_picture_is_a_png_with_a_bar_for_each_device(tmp_path: Path) -> None:
    png = tmp_path / "map.png"
    text = device_map_table(model(), MAP, {0: 64, 1: 192, "cpu": 10**9}, png=png)
    assert text == device_map_table(model(), MAP, {0: 64, 1: 192, "cpu": 10**9})
    width = map_picture.WIDTH * map_picture.DOTS_PER_INCH
    assert size_of(png)[0] == width
    device_map_table(model(), MAP, png=str(tmp_path / "two"))
    assert size_of(tmp_path / "two")[0] == width
    assert size_of(tmp_path / "two")[1] < size_of(png)[1]


def test_a_picture_goes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    (tmp_path / "map.png").symlink_to("theirs")
    device_map_table(model(), MAP, png=tmp_path / "map.png")
    assert (tmp_path / "theirs").read_bytes() == b""
    assert size_of(tmp_path / "map.png")[0] > 0


def test_each_part_is_drawn_in_the_colour_of_its_class(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    rows = [
        Row("0", ["a"], [Block("a", "Embedding", 600), Block("b.0", "Layer", 300)], 900, 0, 1000),
        Row("1", ["b"], [Block("b.0", "Layer", 100)], 100, 500, 1000),
    ]
    map_picture.draw(MapTable("Model", rows, []), tmp_path / "map.png")
    pixels = (255 * image.imread(tmp_path / "map.png")[..., :3]).round().astype(int)

    def share(colour: str) -> float:
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        return float((pixels == wanted).all(-1).mean())

    embedding, layer = (share(colour) for colour in map_picture._COLOURS[:2])
    assert embedding > 1.5 * layer > 0
    assert share(map_picture._COLOURS[2]) == 0


def test_an_empty_map_can_be_drawn(tmp_path: Path) -> None:
    assert device_map_table(nn.Identity(), {"": 0}, {0: 10}, png=tmp_path / "map.png").startswith("Identity: 0 B on 1")
    assert size_of(tmp_path / "map.png")[0] > 0


def test_a_map_that_leaves_something_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no device to 1\.weight, 2\.weight"):
        device_map_table(model(), {"0": 0}, png=tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"map\.png': there is no folder"):
        device_map_table(model(), MAP, png=tmp_path / "none" / "map.png")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        device_map_table(model(), MAP, png=tmp_path)


def test_without_matplotlib_it_is_said_once_and_the_text_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match=r"needs the Python package matplotlib.*or leave png out"):
        device_map_table(model(), MAP, png="map.png")
    assert device_map_table(model(), MAP).startswith("Sequential")
