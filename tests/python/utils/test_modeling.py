"""What other packages import for large models, and sizes as texts."""

from __future__ import annotations

import accelerate.utils.modeling as original_modeling
import pytest
from accelerate.utils import convert_file_size_to_int as original
from hypothesis import given
from hypothesis import strategies as st

from accelerate_cpp import utils
from accelerate_cpp.utils import convert_file_size_to_int, modeling


@given(st.floats(0, 1000), st.sampled_from(["KB", "Mb", "gb", "KiB", "Mib", "GIB"]))
def test_texts_are_as_many_bytes_as_in_the_original(number: float, unit: str) -> None:
    assert convert_file_size_to_int(f"{number}{unit}") == original(f"{number}{unit}")


def test_a_number_is_bytes_already() -> None:
    assert convert_file_size_to_int(7) == 7


@pytest.mark.parametrize("size", ["5XX", "", "b", -1])
def test_what_is_no_size_is_refused(size: str | int) -> None:
    with pytest.raises(ValueError, match=f"size={size!r}: expected a number of bytes"):
        convert_file_size_to_int(size)


def test_names_are_those_of_the_original_and_the_same_objects_everywhere() -> None:
    elsewhere = {"ensure_weights_retied"}
    assert all(hasattr(original_modeling, name) for name in set(modeling.__all__) - elsewhere)
    for name in set(modeling.__all__) & set(utils.__all__):
        assert getattr(utils, name) is getattr(modeling, name)
