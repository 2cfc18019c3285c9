"""The one table of what is refused."""

from __future__ import annotations

import pytest

from accelerate_cpp.config import unsupported
from accelerate_cpp.errors import InvalidArgument

ROWS = [
    *unsupported.ARGUMENTS,
    *unsupported.METHODS,
    *(row for _, row in unsupported.SWITCHES),
]


def test_every_name_has_one_row_with_every_column_filled() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.asked and row.instead for row in ROWS)


def test_a_refusal_says_what_was_found_what_it_means_and_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"fsdp_plugin=7: sharding parameters .* plain data parallelism"):
        unsupported.refuse_given({"deepspeed_plugin": None, "fsdp_plugin": 7})


def test_nothing_is_refused_that_is_none_or_not_in_the_table() -> None:
    unsupported.refuse_given({"fsdp_plugin": None, "AutocastKwargs": object()})


@pytest.mark.parametrize("row", [row for _, row in unsupported.SWITCHES], ids=lambda row: row.name)
def test_a_variable_that_switches_on_something_unsupported_is_refused_by_its_name(row: unsupported.Unsupported) -> None:
    with pytest.raises(InvalidArgument, match=row.name):
        unsupported.refuse_environment({row.name: "true"})


@pytest.mark.parametrize("text", ["", "false", "0", "no"])
def test_a_variable_that_switches_it_off_is_accepted(text: str) -> None:
    unsupported.refuse_environment({row.name: text for _, row in unsupported.SWITCHES})


def test_methods_that_are_not_there_have_a_message_and_others_have_none() -> None:
    assert "torch.optim" in (unsupported.method_refusal("lomo_backward") or "")
    assert unsupported.method_refusal("no_such_method") is None


def test_the_markdown_table_holds_every_row() -> None:
    lines = unsupported.markdown_table().splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert all(line.count("|") == 4 for line in lines)
    assert "| `Accelerator.lomo_backward` |" in unsupported.markdown_table()
