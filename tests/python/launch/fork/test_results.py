from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest

from accelerate_cpp.launch.fork.results import is_in_main, result_files, send, values_of


def _received(*values: Any) -> list[Any] | None:
    with result_files(len(values)) as files:
        for file, value in zip(files, values, strict=True):
            send(value, file)
        return values_of(files)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A ``__main__`` with a class ``Net`` in it."""
    module = ModuleType("__main__")
    exec("class Net:\n    class Part: pass\n    def method(self): pass\ndef train(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_values_come_by_rank() -> None:
    assert _received(1, {"loss": 0.5}, None) == [1, {"loss": 0.5}, None]


def test_nothing_returned_anywhere_is_nothing() -> None:
    assert _received(None, None) is None


def test_objects_of_main_are_of_the_same_class_when_they_come(main: ModuleType) -> None:
    (value,) = _received([main.Net(), main.Net.Part(), main.train]) or [None]
    assert [type(value[0]), type(value[1]), value[2]] == [main.Net, main.Net.Part, main.train]


def test_only_what_main_has_under_its_name_is_in_main(main: ModuleType) -> None:
    assert is_in_main(main.Net)
    assert is_in_main(main.Net.method)
    assert not is_in_main(main.Net())
    assert not is_in_main(print)
    old = main.Net
    exec("class Net: pass", main.__dict__)
    assert not is_in_main(old)


def test_local_classes_come_by_value() -> None:
    class Local:
        x = 3

    (value,) = _received(Local()) or [None]
    assert value.x == 3


def test_value_that_cannot_be_sent_is_none_with_a_warning_and_the_others_come() -> None:
    with pytest.warns(UserWarning, match=r"rank 1 returned a value of type generator, which cannot be sent.*TypeError"):
        assert _received(1, (value for value in ()), 3) == [1, None, 3]


def test_value_that_cannot_be_read_is_none_with_a_warning(main: ModuleType) -> None:
    with result_files(1) as files:
        send(main.Net(), files[0])
        del main.Net
        with pytest.warns(UserWarning, match="rank 0 returned a value of type unknown"):
            assert values_of(files) == [None]


def test_large_tensors_come_and_outlive_the_files() -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = _received(torch.arange(25_000_000))
    assert values is not None
    assert values[0][-1] == 24_999_999


def test_files_are_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with result_files(3):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
