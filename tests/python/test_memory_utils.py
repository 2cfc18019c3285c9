"""The old place of the helpers for memory."""

from __future__ import annotations

import importlib
import sys

import pytest

from accelerate_cpp.utils import memory


def test_the_old_module_warns_and_has_the_same_functions(monkeypatch):
    monkeypatch.delitem(sys.modules, "accelerate_cpp.memory_utils", raising=False)
    with pytest.warns(FutureWarning, match="import find_executable_batch_size from accelerate_cpp"):
        old = importlib.import_module("accelerate_cpp.memory_utils")
    assert old.find_executable_batch_size is memory.find_executable_batch_size
