"""Compares arguments of ``Accelerator`` with settings of the launch for the same option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from accelerate_cpp.check.observed import Observed

_DEFAULT = "default"


def judge_arguments(observed: Observed, constructor: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compares the arguments of ``Accelerator`` with the settings of the launch."""
    try:
        given = inspect.signature(constructor).bind(None, *args, **kwargs).arguments
    except TypeError:  # the constructor will report it
        return
    precision = given.get("mixed_precision")
    if precision is not None:
        _judge(observed, "mixed_precision", str(precision), "precision-conflict", "the argument counts")
    plugin = given.get("gradient_accumulation_plugin")
    if plugin is not None:
        steps, outcome = plugin.num_steps, "the plugin counts"
    else:
        steps, outcome = given.get("gradient_accumulation_steps"), "the argument is ignored"
    if steps is not None:
        _judge(observed, "gradient_accumulation_steps", steps, "accumulation-conflict", outcome)
    backend = given.get("dynamo_backend")
    if backend is not None:
        _judge(observed, "dynamo_backend", str(backend).lower(), "compiler-conflict", "the argument counts")
    if given.get("cpu") and observed.task.settings.get("multi_gpu", (False, _DEFAULT))[0]:
        observed.find(
            "warning",
            "device-conflict",
            "Accelerator(cpu=True), and the launch asks for GPUs by "
            f"{observed.task.settings['multi_gpu'][1]}: they are not used",
            "leave one of them out",
        )


def _judge(observed: Observed, name: str, in_code: Any, code: str, outcome: str) -> None:
    value, source = observed.task.settings.get(name, (None, _DEFAULT))
    if source != _DEFAULT and value is not None and str(value).lower() != str(in_code).lower():
        observed.find(
            "warning",
            code,
            f"{name} is {in_code} in the script, and {value} by {source}: {outcome}",
            "say it in one place",
        )
