"""Outputs of parts are joined to those of the batch."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.outputs import Outputs


def test_tensors_have_the_rows_of_all_parts() -> None:
    outputs = Outputs()
    for begin, rows in ((0, 2), (2, 2), (4, 1)):
        value = torch.arange(begin, begin + rows, dtype=torch.float).requires_grad_()
        outputs.keep({"rows": value, "both": (value[:, None] * 2, "text")})
    joined = outputs.joined()
    assert joined["rows"].tolist() == [0, 1, 2, 3, 4]
    assert not joined["rows"].requires_grad
    assert joined["both"][0].shape == (5, 1)
    assert joined["both"][1] == "text"


def test_a_tensor_without_rows_is_that_of_a_single_part() -> None:
    outputs = Outputs()
    outputs.keep(torch.tensor(3.0))
    assert outputs.joined() == 3
    outputs.keep(torch.tensor(4.0))
    with pytest.raises(InvalidArgument, match="a tensor without dimensions for each of 2 parts"):
        outputs.joined()
