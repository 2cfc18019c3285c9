"""GradientReducer as Python sees it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import GradientReducer, create_backend, known_statistics
from accelerate_cpp.errors import InvalidArgument, PeerLost

MINUTE = timedelta(minutes=1)
ARGUMENTS: dict[str, Any] = {"first_bucket_cap_bytes": 1 << 20, "bucket_cap_bytes": 1 << 20, "timeout": MINUTE}


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
        ([torch.ones(2)], "found a tensor that requires none"),
        ([torch.ones(2, requires_grad=True) * 2], "found the result of an operation"),
        ([torch.ones(2, requires_grad=True, device="meta")], "found a tensor on meta"),
        ([torch.ones(2, requires_grad=True, dtype=torch.complex64)], "ComplexFloat"),
    ],
)
def test_parameters_that_cannot_be_averaged_are_refused(parameters: list[torch.Tensor], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        alone(*parameters)


def test_an_error_in_backward_keeps_its_type_and_an_abort_its_reason() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    communicator = create_backend(dist.HashStore(), 0, 1, MINUTE).communicator
    reducer = GradientReducer(communicator, [("weight", parameter, False)], **ARGUMENTS)
    with pytest.raises(InvalidArgument, match="create_graph=True"):
        parameter.pow(2).sum().backward(create_graph=True)
    reducer.abort(reason="an earlier error")
    with pytest.raises(PeerLost, match="an earlier error"):
        communicator.broadcast_tensors([torch.ones(1)], 0, MINUTE)


def test_an_abort_of_a_backward_pass_that_stays_local_harms_nobody() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    reducer = alone(parameter)
    reducer.synchronizing = False
    reducer.abort("nobody waits for it")
    reducer.synchronizing = True
    parameter.sum().backward()
    assert parameter.grad is not None


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
