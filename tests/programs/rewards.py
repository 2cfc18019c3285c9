"""What trainers that generate ask for: a judgement of each completion."""

from __future__ import annotations

from typing import Any


def different_words(completions: list[str], **_: Any) -> list[float]:
    """The share of words that come once."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]
