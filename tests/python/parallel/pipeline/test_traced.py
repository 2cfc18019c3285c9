"""Traced stages, one after the other, compute what the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.traced import TracedStage, tensors_in, traced_stages


class Model(nn.Module):
    """Later stages read an input, what lies expanded in memory, and a weight of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor, scale: float, *, mask: Tensor) -> dict[str, Any]:
        bias = x[:, :1].expand(-1, 4)
        y = x
        for layer in self.layers:
            y = layer(y).tanh() + bias
        return {"y": y * mask, "nothing": None, "x": x, "sum": (y * scale).sum()}


@pytest.mark.parametrize("points", [["layers.1"], ["layers.2", "layers.3"], ["layers.1", "layers.2", "layers.3"]])
def test_stages_pass_on_what_later_ones_need(points: list[str]) -> None:
    model = Model().eval()
    inputs: Any = (torch.rand(3, 4), 0.5), {"mask": torch.rand(3, 4)}
    stages = traced_stages(model, points, inputs)
    assert len(stages) == len(points) + 1
    values: Any = tuple(tensors_in(inputs))
    for stage in stages:
        assert isinstance(stage, TracedStage)
        values = stage(*(values if isinstance(values, tuple) else (values,)))
        assert all(value.is_contiguous() and not value._is_view() for value in values)
    expected = model(*inputs[0], **inputs[1])
    torch.testing.assert_close(values, tuple(value for value in expected.values() if value is not None))
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_a_single_tensor_is_no_tuple() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = traced_stages(model, ["1"], ((torch.ones(1, 2),), {}))
    torch.testing.assert_close(second(first(torch.ones(1, 2))), model(torch.ones(1, 2)))


def test_what_cannot_be_traced_is_refused() -> None:
    example: Any = ((torch.ones(1, 4), 0.5), {"mask": torch.ones(1, 4)})
    with pytest.raises(InvalidArgument, match=r"split_points has 'layers\.9', but Model has no such module"):
        traced_stages(Model(), ["layers.9"], example)
    with pytest.raises(InvalidArgument, match="splitting Model at layers gave 1 stages; expected 2"):
        traced_stages(Model(), ["layers"], example)
    with pytest.raises(InvalidArgument, match=r"torch.export cannot trace Model .*\(.*mask.*\); switch off caches"):
        traced_stages(Model(), ["layers.1"], (example[0], {}))
