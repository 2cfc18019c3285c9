from __future__ import annotations

import os
from typing import Any

import pytest

from accelerate_cpp.launch.fork.pickle_files import Pickler, packed, read

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
LARGE = 1_000_000  # fp32: such a file is mapped


def _sent(value: Any) -> Any:
    with packed(value) as file:
        return read(file)


@pytest.mark.parametrize("size", [0, 1, 7, LARGE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128"])
def test_tensors_arrive_as_they_were(size: int, dtype: str) -> None:
    tensor = (torch.arange(size) % 3).to(getattr(torch, dtype))
    arrived = _sent(["before", tensor])
    assert arrived[0] == "before"
    assert arrived[1].dtype == tensor.dtype
    assert torch.equal(arrived[1], tensor)


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    whole = torch.zeros(10)
    first, second = _sent([whole, whole[2:].view(2, 4).t()])
    second += 1
    assert first.tolist() == [0, 0] + [1] * 8


def test_parameters_and_modules_keep_what_they_share() -> None:
    model = torch.nn.Linear(3, 3)
    model.tied = model.weight
    arrived = _sent(model)
    assert arrived.tied is arrived.weight
    assert arrived.weight.requires_grad
    assert torch.equal(arrived.weight, model.weight)


@pytest.mark.parametrize("size", [3, LARGE])
def test_what_a_reader_writes_nobody_else_sees(size: int) -> None:
    tensor, array = torch.zeros(size), np.zeros(size)
    with packed([tensor, array]) as file:
        first, second = read(file), read(file)
    for arrived in first:
        arrived += 1
    assert [arrived.sum() for arrived in (*second, tensor, array)] == [0, 0, 0, 0]
    assert first[0].sum() == size


def test_bytes_of_tensors_are_beside_the_pickle_and_aligned() -> None:
    with packed([torch.ones(3), torch.ones(LARGE)]) as file:
        small, large = read(file)
    assert (small.data_ptr() % 16, large.data_ptr() % 64) == (0, 0)


def test_functions_and_classes_defined_anywhere_arrive() -> None:
    scale = 3

    class Local:
        def times(self, value: int) -> int:
            return value * scale

    assert _sent(lambda value: Local().times(value))(2) == 6


def test_what_pickle_raises_is_raised_and_no_file_is_left() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match="generator"), packed(value for value in ()):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_can_be_written_again() -> None:
    with packed("x" * 5000) as file:
        Pickler().write("short", file)
        assert read(file) == "short"
        assert os.fstat(file).st_size < 1000
