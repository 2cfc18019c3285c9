"""The one table of what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accelerate_cpp.config import unsupported
from accelerate_cpp.errors import InvalidArgument

ROWS = [
    *unsupported.ARGUMENTS,
    *unsupported.METHODS,
    *unsupported.FUNCTIONS,
    *(row for _, row in unsupported.SWITCHES),
]


def test_every_name_has_one_row_with_every_column_filled() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.asked and row.instead for row in ROWS)


def test_a_refusal_says_what_was_found_what_it_means_and_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"init_method=7: a rendezvous of the caller's own .* set RANK"):
        unsupported.refuse_given({"torch_tp_plugin": None, "init_method": 7})


def test_nothing_is_refused_that_is_none_or_not_in_the_table() -> None:
    unsupported.refuse_given({"init_method": None, "AutocastKwargs": object()})


@pytest.mark.parametrize("row", [row for _, row in unsupported.SWITCHES], ids=lambda row: row.name)
def test_a_variable_that_switches_on_something_unsupported_is_refused_by_its_name(row: unsupported.Unsupported) -> None:
    with pytest.raises(InvalidArgument, match=row.name):
        unsupported.refuse_environment({row.name: "true"})


@pytest.mark.parametrize("text", ["", "false", "0", "no"])
def test_a_variable_that_switches_it_off_is_accepted(text: str) -> None:
    unsupported.refuse_environment({row.name: text for _, row in unsupported.SWITCHES})


@pytest.mark.parametrize("row", [*unsupported.METHODS, *unsupported.FUNCTIONS], ids=lambda row: row.name)
def test_a_row_is_refused_by_its_name(row: unsupported.Unsupported) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        unsupported.refuse(row.name, f"{row.name}(...)")
    assert str(refusal.value) == row.sentence(f"{row.name}(...)")


def test_of_a_plugin_the_refusal_shows_the_class() -> None:
    @dataclass
    class Plugin:
        many: str = "fields"

    with pytest.raises(InvalidArgument, match=r"^init_method=Plugin\(\.\.\.\): a rendezvous"):
        unsupported.refuse_given({"init_method": Plugin()})


def test_a_switch_is_found_by_its_name() -> None:
    switch = unsupported.switch("ACCELERATE_USE_SAGEMAKER")
    assert switch.get({"ACCELERATE_USE_SAGEMAKER": "true"})
    assert (switch.name, switch.render(True)) == ("ACCELERATE_USE_SAGEMAKER", "true")


def test_the_markdown_table_holds_every_row_and_functions_with_the_same_reason_in_one() -> None:
    lines = unsupported.markdown_table().splitlines()
    reasons = {(row.asked, row.instead) for row in unsupported.FUNCTIONS}
    assert len(lines) == 2 + len(ROWS) - len(unsupported.FUNCTIONS) + len(reasons)
    assert all(line.count("|") == 4 for line in lines)
    assert "| `Accelerator.lomo_backward` |" in unsupported.markdown_table()
    assert all(f"`{row.name}`" in unsupported.markdown_table() for row in unsupported.FUNCTIONS)
