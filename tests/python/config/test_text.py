from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accelerate_cpp.config.text import parsed_json, parsed_yaml


def test_text_becomes_a_value() -> None:
    assert parsed_json(b'{"a": [1, 2.5]}') == parsed_json('{"a": [1, 2.5]}') == parsed_yaml("a: [1, 2.5]")


@pytest.mark.parametrize(
    ("parsed", "text", "words"),
    [
        (parsed_json, "{", "Expecting property name"),
        (parsed_json, b"[\x80]", "decode"),
        (parsed_json, "[" * 100_000, "nested more deeply than Python can read"),
        (parsed_json, '{"a":' * 100_000, "nested more deeply than Python can read"),
        (parsed_json, "1" * 5000, "a number in it has thousands of digits"),
        (parsed_yaml, "a: [", "expected the node content"),
        (parsed_yaml, "[" * 5000, "nested more deeply than Python can read"),
        (parsed_yaml, "a: " + "1" * 5000, "a number in it has thousands of digits"),
        (parsed_yaml, "a: 2020-99-99", "month must be in 1..12"),
    ],
)
def test_what_cannot_be_read_is_a_value_error_in_one_line(
    parsed: Callable[[str | bytes], Any], text: str | bytes, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        parsed(text)
    assert "\n" not in str(refused.value)
