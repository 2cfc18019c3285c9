"""Asks one question of ``accelerate-cpp config``: with a menu on a terminal, else with typed lines."""

from __future__ import annotations

import sys
from typing import Any

from accelerate_cpp.commands import menu
from accelerate_cpp.config.answers import as_text
from accelerate_cpp.config.questions import Answers, Question


def ask(question: Question, answers: Answers, suggested: Any) -> Any:
    """The user's answer; Enter accepts ``suggested``, unless that is ``None``.

    Raises:
        EOFError: the input ends before there is an answer.
    """
    print(f"\n{question.text}")
    if question.choices and menu.is_possible():
        keys = list(question.choices)
        shown = None if suggested is None else as_text(suggested)
        chosen = menu.choose(_rows(question), keys.index(shown) if shown in keys else 0)
        return question.read(keys[chosen], answers)
    return _typed(question, answers, suggested)


def _typed(question: Question, answers: Answers, suggested: Any) -> Any:
    for number, row in enumerate(_rows(question), start=1):
        print(f"  {row}" if _has_numbers(question) else f"  {number}  {row}")
    shown = "" if suggested is None else f" [{as_text(suggested)}]"
    while True:
        print(f"{question.key}{shown}: ", end="", flush=True)
        text = _line()
        if not text and suggested is not None:
            return suggested
        try:
            return question.read(_choice_of_number(question, text), answers)
        except ValueError as error:
            print(f"  {text!r}: {error}")


def _rows(question: Question) -> list[str]:
    width = max(map(len, question.choices), default=0)
    return [f"{choice:{width}}  {meaning}" for choice, meaning in question.choices.items()]


def _has_numbers(question: Question) -> bool:
    """Whether the choices are numbers themselves."""
    return bool(question.choices) and all(choice.isdecimal() for choice in question.choices)


def _choice_of_number(question: Question, text: str) -> str:
    keys = list(question.choices)
    if _has_numbers(question):
        return text
    return keys[int(text) - 1] if text.isdecimal() and 1 <= int(text) <= len(keys) else text


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the input ended")
    if not sys.stdin.isatty():
        print(line.strip())  # so that a log also has the answers
    return line.strip()
