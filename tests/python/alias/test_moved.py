"""Modules under their former names, and pickles that say these."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys

import pytest

from accelerate_cpp.alias.moved import HOME_OF
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import DeepSpeedPlugin


@pytest.mark.parametrize("former", HOME_OF)
def test_a_module_is_the_same_under_its_former_name(former: str) -> None:
    now = importlib.import_module(f"accelerate_cpp.{HOME_OF[former]}")
    assert importlib.import_module(f"accelerate_cpp.{former}") is now
    assert now.__spec__ is not None
    assert now.__spec__.name == f"accelerate_cpp.{HOME_OF[former]}"


def test_pickles_of_before_load() -> None:
    assert pickle.loads(b"caccelerate_cpp.utils.deepspeed_plugin\nDeepSpeedPlugin\n.") is DeepSpeedPlugin
    # What a prepared optimizer has of its Accelerator is asked for where it is loaded.
    assert pickle.loads(b"caccelerate_cpp.gradient_state\n_current_accumulation\n(tR.") is current.accumulation


def test_a_name_that_no_module_ever_had_is_not_found() -> None:
    assert importlib.util.find_spec("accelerate_cpp.utils.never") is None


def test_the_first_import_may_be_by_a_former_name() -> None:
    code = "from accelerate_cpp.utils.device_map import infer_auto_device_map as f; print(f.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["accelerate_cpp.placement.device_map"]
