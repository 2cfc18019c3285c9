"""Constants, where users import them from."""

from __future__ import annotations

import accelerate.utils
import accelerate.utils.constants as original
import pytest

import accelerate_cpp.utils
from accelerate_cpp.utils import constants


@pytest.mark.parametrize(
    "name", [name for name in dir(constants) if name.endswith("_NAME") and hasattr(accelerate.utils, name)]
)
def test_constants_are_those_of_the_original_and_can_be_imported_from_utils(name: str) -> None:
    assert getattr(constants, name) == getattr(original, name)
    assert getattr(accelerate_cpp.utils, name) is getattr(constants, name)


@pytest.mark.parametrize("name", [name for name in dir(constants) if name.isupper()])
def test_every_constant_is_that_of_the_original(name: str) -> None:
    assert getattr(constants, name) == getattr(original, name)


@pytest.mark.parametrize(
    "name",
    [
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "TORCH_LAUNCH_PARAMS",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ],
)
def test_some_can_be_imported_from_utils(name: str) -> None:
    assert getattr(accelerate_cpp.utils, name) is getattr(constants, name)
