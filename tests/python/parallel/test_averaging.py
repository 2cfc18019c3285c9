"""Which tensors are averaged, and with how many collectives. What they become is tested with two processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp.parallel import averaging
from accelerate_cpp.parallel.averaging import ParameterAverage, average


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """What each collective is given."""
    calls: list[list[torch.Tensor]] = []
    monkeypatch.setattr(averaging, "_all_reduce", calls.append)
    return calls


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_tensors_of_one_dtype_travel_together_in_their_order(sent: list[list[torch.Tensor]]) -> None:
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(4, 1), torch.zeros(())]
    average(tensors)
    assert [[tuple(tensor.shape) for tensor in call] for call in sent] == [[(2,), (4, 1), ()], [(3,)]]
    assert sent[0][0].data_ptr() == tensors[0].data_ptr()


def test_without_elements_there_is_no_collective(sent: list[list[torch.Tensor]]) -> None:
    average([torch.zeros(0, 3)])
    average([])
    assert sent == []


def test_complex_numbers_travel_as_pairs_of_real_ones(sent: list[list[torch.Tensor]]) -> None:
    average([torch.zeros(2), torch.zeros(3, dtype=torch.complex64)])
    assert [[tuple(tensor.shape) for tensor in call] for call in sent] == [[(2,), (3, 2)]]


@pytest.mark.usefixtures("group_of_one")
def test_the_average_of_one_rank_is_what_it_has() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    average([parameter])
    assert parameter.tolist() == [1.0, -2.0]
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_parameters_are_averaged_until_the_first_average_after_they_were_frozen(
    sent: list[list[torch.Tensor]],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 7, bias=False))
    model[0].requires_grad_(False)
    take_average = ParameterAverage(model)

    def shapes_of_the_next() -> list[tuple[int, ...]]:
        take_average()
        return [tuple(tensor.shape) for tensor in sent.pop()]

    assert shapes_of_the_next() == [(7, 5)]
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    assert shapes_of_the_next() == [(5, 3), (7, 5)]
    assert shapes_of_the_next() == [(5, 3)]


def test_tied_parameters_are_averaged_once(sent: list[list[torch.Tensor]]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    ParameterAverage(model)()
    assert [len(call) for call in sent] == [1]


def test_buffers_and_integers_stay_out(sent: list[list[torch.Tensor]]) -> None:
    model = torch.nn.BatchNorm1d(2)
    model.register_parameter("codes", torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    ParameterAverage(model)()
    assert [[tuple(tensor.shape) for tensor in call] for call in sent] == [[(2,), (2,)]]
