"""How questions become a configuration file: who answers them, and what the answers say.

A menu, typed lines and a file of answers all go through :func:`answered`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate_cpp.config import file as config_file
from accelerate_cpp.config.questions import QUESTIONS, Answers, Machine, Question
from accelerate_cpp.config.unsupported_flags import GROUPS
from accelerate_cpp.errors import InvalidArgument

_BY_KEY: Mapping[str, Question] = {question.key: question for question in QUESTIONS}
# Sections with a question of their own: whether the others of the section are asked.
_OPTIONAL = {key for key in _BY_KEY if any(other.startswith(f"{key}.") for other in _BY_KEY)}


def not_asked() -> str:
    """What the file could say and accelerate_cpp cannot do yet, in words."""
    return ", ".join(group.purpose for group in GROUPS)


Ask = Callable[[Question, Answers, Any], Any]


def answered(ask: Ask, machine: Machine, before: Answers | None = None) -> dict[str, Any]:
    """Goes through the table and lets ``ask`` answer each question whose condition holds.

    Args:
        ask: called with the question, the answers so far and the value to suggest, ``None`` where there is none.
        before: keys and values of an earlier file; where they fit they are suggested.

    Returns:
        The answers by key, in the order of the table.
    """
    earlier = _flat(before or {})
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.when.holds(answers):
            answers[question.key] = ask(question, answers, _suggestion(question, answers, machine, earlier))
    return answers


def _suggestion(question: Question, answers: Answers, machine: Machine, earlier: Answers) -> Any:
    if earlier.get(question.key) is not None:
        try:
            return question.read(as_text(earlier[question.key]), answers)
        except ValueError:
            pass  # it does not fit the answers of today
    return question.default(answers, machine)


def as_text(value: Any) -> str:
    """``value``, as a file gives it, in the form in which it would be typed."""
    if isinstance(value, bool):  # YAML 1.1 reads an unquoted no as false, also where it is one of the choices
        return "yes" if value else "no"
    return ",".join(map(as_text, value)) if isinstance(value, (list, tuple)) else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the keys of sections as ``section.key``, and whether there are optional ones."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": content for inner, content in value.items()}
            flat |= {name: bool(value)} if name in _OPTIONAL else {}
        else:
            flat[str(name)] = value
    return flat


def answers_of_file(path: Path, machine: Machine) -> dict[str, Any]:
    """The answers that a file gives (YAML or JSON: key to answer); missing ones take their defaults.

    Raises:
        InvalidArgument: the file cannot be read; a key is unknown or its question is not asked, so that it would have
            no effect; an answer is wrong, or a question without default has none.
    """
    given = {name: value for name, value in _flat(config_file.content_of(path)).items() if value is not None}
    for name in given:
        if name not in _BY_KEY:
            raise config_file.unknown_key(str(path), name, _BY_KEY)

    def look_up(question: Question, answers: Answers, suggested: Any) -> Any:
        if question.key not in given:
            if suggested is None:
                raise InvalidArgument(f"{path}: {question.key} is missing and has no default; it is: {question.text}")
            return suggested
        try:
            return question.read(as_text(given[question.key]), answers)
        except ValueError as error:
            raise InvalidArgument(f"{path}: {question.key}: {given[question.key]!r}: {error}") from None

    answers = answered(look_up, machine)
    for name in sorted(given.keys() - answers.keys()):
        words = _BY_KEY[name].when.words
        raise InvalidArgument(f"{path}: {name} would have no effect: it is only used if {words}; leave it out")
    return answers


def file_values(answers: Answers, before: Answers | None = None) -> dict[str, Any]:
    """What to write: the answers, what ``before`` says of other matters, and the defaults of the rest."""
    values = {name: key.default for name, key in config_file.KEYS.items()} | kept(answers, before or {})
    kind = answers["distributed_type"]
    values |= {"num_processes": 1, "use_cpu": kind == "MULTI_CPU"}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in answers.items():
        section, dot, key = name.partition(".")
        if value == "" or name in _OPTIONAL:  # the first may be left open; the second says itself whether it is there
            continue
        if dot:
            sections.setdefault(section, {})[key] = value
        else:
            values[name] = value
    if kind == "FSDP":
        earlier = (before or {}).get("fsdp_config") or {}
        others = {name: value for name, value in earlier.items() if f"fsdp_config.{name}" not in _BY_KEY}
        sections["fsdp_config"] = {**others, "fsdp_version": 2, **sections["fsdp_config"]}
    values |= sections
    if values["dynamo_config"] == {"dynamo_backend": "NO"}:
        values["dynamo_config"] = None
    return values


def kept(answers: Answers, before: Answers) -> dict[str, Any]:
    """The part of an earlier file that stays: keys that are never asked about, and sections that were not this time."""
    asked = {name.partition(".")[0] for name in answers} | {name for name in _BY_KEY if "." not in name}
    return {name: value for name, value in before.items() if name not in asked}
