"""What all handlers have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelerate_cpp.plugins.handlers import KwargsHandler


@dataclass
class Options(KwargsHandler):
    depth: int = 3
    names: list[str] = field(default_factory=list)


def test_keyword_arguments_are_the_fields_with_other_values_than_their_defaults() -> None:
    assert Options().to_kwargs() == {}
    assert Options(names=["a"]).to_kwargs() == {"names": ["a"]}


def test_a_dict_has_every_field_and_shares_no_value() -> None:
    options = Options(names=["a"])
    copied = options.to_dict()
    copied["names"].append("b")
    assert (copied["depth"], options.names) == (3, ["a"])
