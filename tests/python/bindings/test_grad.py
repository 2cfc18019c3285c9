"""GradientReducer as Python sees it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import GradientReducer, create_backend, known_statistics, note_registration
from accelerate_cpp.errors import InvalidArgument

MINUTE = timedelta(minutes=1)
ARGUMENTS: dict[str, Any] = {
    "left_out": [],
    "first_bucket_cap_bytes": 1 << 20,
    "bucket_cap_bytes": 1 << 20,
    "timeout": MINUTE,
}


def alone(*parameters: torch.Tensor, **arguments: Any) -> GradientReducer:
    communicator = create_backend(dist.HashStore(), 0, 1, MINUTE).communicator
    named = [(f"p{number}", parameter, False) for number, parameter in enumerate(parameters)]
    return GradientReducer(communicator, named, **{**ARGUMENTS, **arguments})


def test_it_keeps_its_communicator_and_its_parameters_alive() -> None:
    reducer = alone(torch.nn.Parameter(torch.ones(5)))
    assert reducer.bucket_sizes_bytes == [64]


def test_synchronising_can_be_switched() -> None:
    reducer = alone(torch.nn.Parameter(torch.ones(5)))
    assert reducer.synchronizing
    reducer.synchronizing = False
    assert not reducer.synchronizing


def test_buckets_have_the_sizes_that_the_caps_allow() -> None:
    parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(5)]
    reducer = alone(*parameters, first_bucket_cap_bytes=256, bucket_cap_bytes=512)
    assert reducer.bucket_sizes_bytes == [256, 512, 512]
    with pytest.raises(InvalidArgument, match="caps above 0 bytes"):
        alone(*parameters, bucket_cap_bytes=0)


def test_a_gradient_stays_the_same_object_between_passes() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    parameter.sum().backward()
    gradient = parameter.grad
    parameter.sum().backward()
    assert parameter.grad is gradient
    assert gradient is not None
    assert gradient.tolist() == [2] * 5
    assert reducer.synchronizing


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], "no parameter that requires a gradient"),
        ([torch.ones(2, requires_grad=True) * 2], "found the result of an operation"),
        ([torch.ones(2, requires_grad=True, device="meta")], "found a tensor on meta"),
        ([torch.ones(2, dtype=torch.uint16)], "UInt16"),
    ],
)
def test_parameters_that_cannot_be_averaged_are_refused(parameters: list[torch.Tensor], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        alone(*parameters)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("caller_tells", [False, True])
def test_an_error_in_backward_keeps_its_type_and_the_next_pass_works(caller_tells: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    if caller_tells:
        reducer.expect_backward()
    with pytest.raises(InvalidArgument, match="create_graph=True"):
        parameter.pow(2).sum().backward(create_graph=True)
    if caller_tells:
        reducer.backward_failed("it needed a graph")
    assert parameter.grad is None
    parameter.sum().backward()
    assert parameter.grad is not None


def test_a_pass_ends_when_its_caller_says_so() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    reducer.set_weight(2.0)
    reducer.expect_backward()
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1] * 5
    reducer.backward_ended()
    assert parameter.grad.tolist() == [0.5] * 5


def test_a_pass_that_stays_local_keeps_its_gradients_when_it_fails() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    parameter.sum().backward()
    reducer.synchronizing = False
    reducer.backward_failed("nobody waits for it")
    assert parameter.grad is not None


def test_a_parameter_that_was_left_out_and_requires_a_gradient_is_noticed() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    reducer = alone(torch.nn.Parameter(torch.ones(5)), left_out=[frozen])
    assert not reducer.may_lack_parameters()
    note_registration()
    assert reducer.may_lack_parameters()
    assert not reducer.may_lack_parameters()
    frozen.requires_grad_(True)
    assert reducer.may_lack_parameters()


def test_nothing_is_known_of_gradients_that_no_reduction_has_measured() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    parameter.sum().backward()
    assert known_statistics([parameter, torch.nn.Parameter(torch.ones(2))]) == [None, None]
    assert reducer.synchronizing


def test_the_weight_of_gradients_divides_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    reducer.set_weight(4.0)
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.25] * 5
    with pytest.raises(InvalidArgument, match="weight of gradients is -1"):
        reducer.set_weight(-1.0)
