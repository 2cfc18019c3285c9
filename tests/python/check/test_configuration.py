"""Arguments of ``Accelerator`` against the settings of the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.check.configuration import judge_arguments
from accelerate_cpp.check.observed import Observed

Found = Callable[[], dict[str, str]]


@pytest.mark.parametrize(
    ("settings", "arguments", "expected"),
    [
        ({"mixed_precision": ("bf16", "c.yaml")}, {"mixed_precision": "fp16"}, {"precision-conflict": "warning"}),
        ({"mixed_precision": ("bf16", "c.yaml")}, {"mixed_precision": "bf16"}, {}),
        ({"mixed_precision": ("bf16", "c.yaml")}, {}, {}),
        ({"mixed_precision": ("no", "default")}, {"mixed_precision": "fp16"}, {}),
        (
            {"gradient_accumulation_steps": (4, "environment")},
            {"gradient_accumulation_steps": 2},
            {"accumulation-conflict": "warning"},
        ),
        (
            {"gradient_accumulation_steps": (4, "environment")},
            {"gradient_accumulation_plugin": SimpleNamespace(num_steps=2)},
            {"accumulation-conflict": "warning"},
        ),
        ({"dynamo_backend": ("INDUCTOR", "c.yaml")}, {"dynamo_backend": "eager"}, {"compiler-conflict": "warning"}),
        ({"multi_gpu": (True, "c.yaml")}, {"cpu": True}, {"device-conflict": "warning"}),
    ],
)
def test_what_is_said_twice_and_differently_is_a_warning(
    observed: Observed, found: Found, settings: dict[str, Any], arguments: dict[str, Any], expected: dict[str, str]
) -> None:
    observed.task = replace(observed.task, settings=settings)
    judge_arguments(observed, Accelerator.__init__, (), arguments)
    assert found() == expected


def test_arguments_that_do_not_exist_are_left_to_the_constructor(observed: Observed, found: Found) -> None:
    judge_arguments(observed, Accelerator.__init__, (), {"nonsense": 1})
    assert found() == {}
