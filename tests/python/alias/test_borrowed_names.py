"""Names that modules of the original have only because they import them."""

from __future__ import annotations

import importlib
import types
from unittest import mock

import accelerate
import pytest

from accelerate_cpp.alias.borrowed_names import NAMES, lending


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_in_the_originals_module_and_is_what_another_of_ours_has(module: str) -> None:
    # By import and not by attribute: a function of utils has the name of its module.
    importlib.import_module(f"{accelerate.__name__}.{module}")
    ours = importlib.import_module(f"accelerate_cpp.{module}")
    load = lending(module)
    for home, names in NAMES[module].items():
        for name in names.split():
            found = load(name)
            if not isinstance(ours, types.FunctionType):
                assert name not in vars(ours), f"{module} has {name} of its own"
            assert found is not None, (module, home, name)


def test_what_is_not_listed_is_not_there() -> None:
    module = importlib.import_module("accelerate_cpp.state")
    with pytest.raises(AttributeError, match=r"module 'accelerate_cpp.state' has no attribute 'set_seed'"):
        _ = module.set_seed


def test_another_function_can_be_put_in_its_place_and_taken_out_again() -> None:
    module = importlib.import_module("accelerate_cpp.accelerator")
    own = module.is_npu_available
    with mock.patch("accelerate_cpp.accelerator.is_npu_available", return_value="patched"):
        assert module.is_npu_available() == "patched"
    assert module.is_npu_available is own
