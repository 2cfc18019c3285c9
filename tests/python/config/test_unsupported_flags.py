"""The flags that do nothing yet: each once, and with a sentence that says what to do."""

from __future__ import annotations

from collections import Counter

from accelerate_cpp.config.unsupported_flags import GROUPS, INSTEAD, Flag, Group


def test_no_flag_is_named_twice() -> None:
    names = Counter(flag.name for group in GROUPS for flag in group.flags)
    assert [name for name, count in names.items() if count > 1] == []


def test_a_refusal_names_the_flag_and_its_purpose() -> None:
    group = Group("Title", "teleporting", (Flag("far_away", "where to"),))
    told = group.sentence(group.flags[0])
    assert told == f"--far_away: teleporting does not work in accelerate_cpp yet; {INSTEAD}"
