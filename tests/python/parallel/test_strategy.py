"""The interface of strategies."""

from __future__ import annotations

import pytest

from accelerate_cpp.parallel.strategy import Strategy


def test_all_questions_must_be_answered() -> None:
    assert {
        "prepare",
        "models",
        "no_sync",
        "backward",
        "join",
        "clip_grad_norm",
        "unwrap",
        "model_state",
    } == Strategy.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        Strategy()  # type: ignore[abstract]
