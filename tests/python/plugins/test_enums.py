"""The closed sets of names."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from accelerate_cpp.devices.table import accelerators
from accelerate_cpp.plugins import enums

PRINTED_BY_VALUE = [
    enums.DDPCommunicationHookType,
    enums.DynamoBackend,
    enums.LoggerType,
    enums.PrecisionType,
    enums.RNGType,
]
TEXTS = [enums.ComputeEnvironment, enums.DistributedType, enums.FP8BackendType, enums.SageMakerDistributedType]


@pytest.mark.parametrize("kind", PRINTED_BY_VALUE)
def test_members_print_as_their_value_and_values_are_found(kind: type[Enum]) -> None:
    for member in kind:
        assert str(member) == member.value
        assert member.value in kind
        assert member in kind
    assert "x" not in kind
    assert kind.list() == [member.value for member in kind]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", TEXTS)
def test_members_are_texts_that_print_with_their_type(kind: type[Enum]) -> None:
    for member in kind:
        assert member == member.value
        assert str(member) == f"{kind.__name__}.{member.name}"
        assert kind(member.value) is member


def test_some_are_texts_as_well_as_printed_by_value() -> None:
    assert enums.PrecisionType.BF16 == "bf16"
    assert enums.DynamoBackend("INDUCTOR") is enums.DynamoBackend.INDUCTOR


def test_dtypes_that_torch_lacks_are_found_by_value() -> None:
    assert [member.value for member in enums.CustomDtype] == ["fp8", "int4", "int2"]
    assert enums.CustomDtype("int4") is enums.CustomDtype.INT4


def test_every_type_of_several_processes_belongs_to_a_type_of_device() -> None:
    types = {kind for kind in enums.DistributedType if kind.name.startswith("MULTI_")}
    known = ["cpu", *(kind.type for kind in accelerators())]
    assert {enums.type_of_several_processes(device) for device in known} == {*types, enums.DistributedType.XLA}
    assert enums.type_of_several_processes(torch.device("cuda", 3)) is enums.DistributedType.MULTI_GPU
