from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accelerate_cpp.config.text import parsed_json, parsed_yaml, shortened, texts_of


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


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)

# Some releases of PyYAML make the merged pairs one by one.
MERGED = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !!int ''", "does not fit its tag"),
        ("a: !!bool x", "does not fit its tag"),
        ("a: !!timestamp x", "does not fit its tag"),
        ("[" * 300 + "]" * 300, "nested more deeply"),
        (BOMB, "with its aliases written out it has more than"),
        (MERGED, "with its aliases written out it has more than"),
        ("a: &a [*a]", "contains itself"),
        ("!!python/object/apply:os.mkdir [x]", "could not determine a constructor"),
    ],
)
def test_texts_that_are_no_values_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed_yaml(text)


def test_aliases_are_values() -> None:
    assert parsed_yaml("a: &a [1, 2]\nb: [*a, *a]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_json_that_is_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match="nested more deeply"):
        parsed_json("[" * 100_000)


def test_all_texts_of_a_value_are_found() -> None:
    assert sorted(texts_of({"a": ["b", {"c": 1}], "d": ("e", {"f"})})) == ["a", "b", "c", "d", "e", "f"]


def test_values_in_messages_are_short() -> None:
    assert shortened("x") == "'x'"
    assert shortened([1, "a"]) == "[1, 'a']"
    assert len(shortened({str(number): "x" * 10_000 for number in range(1000)})) < 2000


@pytest.mark.parametrize("text", ["a: 1\ntpu_env: [HF_TOKEN=s3cr3t\n", "a: 1\nHF_TOKEN: 's3cr3t", "a: b: s3cr3t"])
def test_a_line_that_cannot_be_read_is_named_without_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"\(line \d, column \d+\)") as refused:
        parsed_yaml(text)
    assert "s3cr3t" not in str(refused.value)
