"""Values as libraries store them."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate_cpp.trackers.values import as_number, flat, leave_out, plain, with_numbers


class Level(IntEnum):
    """An enum of numbers."""

    HIGH = 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2),
        (1.5, 1.5),
        (True, True),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (Level.HIGH, 2),
        (np.bool_(True), True),
        (np.array([[0.5]]), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([3]), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
)
def test_numbers_of_all_kinds_are_numbers_of_python(value: Any, expected: float) -> None:
    number = as_number(value)
    assert number == expected
    assert type(number) is type(expected)


@pytest.mark.parametrize(
    "value",
    ["1", None, [1], {"a": 1}, np.str_("1"), np.array([1, 2]), torch.zeros(2), torch.zeros(0), 1j, torch.tensor(1j)],
)
def test_what_is_no_single_number_is_none(value: Any) -> None:
    assert as_number(value) is None


def test_dictionaries_in_dictionaries_become_names_with_slashes() -> None:
    values = {"loss": 1, "eval": {"loss": 2, "per class": {"a": 3}}, "empty": {}}
    assert list(flat(values)) == [("loss", 1), ("eval/loss", 2), ("eval/per class/a", 3)]


def test_numbers_in_dictionaries_are_numbers_of_python_and_other_objects_stay() -> None:
    curve = torch.zeros(2)
    values = {"loss": torch.tensor(0.5), "eval": {"f1": np.float32(0.25), "none": None}, "curve": curve}
    changed = with_numbers(values)
    assert changed == {"loss": 0.5, "eval": {"f1": 0.25, "none": None}, "curve": curve}
    assert [type(changed["loss"]), type(changed["eval"]["f1"])] == [float, float]
    assert isinstance(values["loss"], torch.Tensor), "the caller's dictionary is not changed"


def test_configurations_become_what_yaml_knows() -> None:
    values = {1: torch.tensor(2), "none": None, "flag": True, "path": Path("a") / "b", "sizes": (1, np.float64(0.5))}
    assert plain(values) == {"1": 2, "none": None, "flag": True, "path": str(Path("a") / "b"), "sizes": [1, 0.5]}
    assert plain({"text"}) == ["text"]
    assert plain(Decimal("0.5")) == "0.5"


def test_what_is_left_out_is_named_with_its_type_but_not_its_value() -> None:
    with pytest.warns(UserWarning, match=r"mlflow leaves out 'curve'.*of type torch.Tensor.*logs numbers") as caught:
        leave_out("mlflow", "curve", torch.zeros(3), "numbers")
    assert "0." not in str(caught[0].message)
