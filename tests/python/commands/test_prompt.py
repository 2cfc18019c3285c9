"""Questions as typed lines."""

from __future__ import annotations

import io
from typing import Any

import pytest

from accelerate_cpp.commands import menu
from accelerate_cpp.commands.prompt import ask
from accelerate_cpp.config.questions import QUESTIONS

BY_KEY = {question.key: question for question in QUESTIONS}


def typed(key: str, text: str, suggested: Any, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Any:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return ask(BY_KEY[key], answers, suggested)


@pytest.mark.parametrize(("text", "value"), [("\n", "fp16"), ("bf16\n", "bf16"), ("3\n", "bf16"), (" FP8 ", "fp8")])
def test_a_choice_is_typed_by_name_or_number(text: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("mixed_precision", text, "fp16", monkeypatch) == value


def test_choices_and_the_suggestion_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("mixed_precision", "\n", "no", monkeypatch)
    shown = capsys.readouterr().out
    assert "  3  bf16  16 bits with the range of float32\n" in shown
    assert "mixed_precision [no]: " in shown


def test_a_number_is_no_choice_where_numbers_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("num_machines", "2\n", 1, monkeypatch) == 2


def test_choices_that_are_numbers_have_no_other_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("deepspeed_config.zero_stage", "1\n", 2, monkeypatch) == 1
    assert "\n  0  nothing\n  1  " in capsys.readouterr().out
    assert typed("deepspeed_config.zero_stage", "\n", 2, monkeypatch) == 2


def test_the_suggestion_of_a_menu_is_found_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr(menu, "is_possible", lambda: True)
    monkeypatch.setattr(menu, "choose", lambda rows, place: places.append(place) or place)
    assert ask(BY_KEY["deepspeed_config.zero_stage"], {}, 3) == 3
    assert places == [3]


def test_wrong_input_is_explained_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("mixed_precision", "fp17\n9\n\n", "no", monkeypatch) == "no"
    shown = capsys.readouterr().out
    assert "'fp17': expected one of no, fp16, bf16, fp8" in shown
    assert "'9': expected one of" in shown
    assert shown.count("mixed_precision [no]: ") == 3


def test_without_a_suggestion_an_answer_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("main_process_ip", "\nnode-0\n", None, monkeypatch) == "node-0"


def test_the_end_of_the_input_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EOFError, match="the input ended"):
        typed("mixed_precision", "fp17\n", "no", monkeypatch)
