"""What tests of saves need that end midway."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def dies_at_the_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], None]]:
    """Call it with the name of a function of ``os``: its second call ends in KeyboardInterrupt.

    What it returns ends that.
    """

    def begin(name: str) -> Callable[[], None]:
        real, has_called = getattr(os, name), []

        def once(*arguments: Any) -> None:
            if has_called:
                raise KeyboardInterrupt
            has_called.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, once)
        return lambda: monkeypatch.setattr(os, name, real)

    return begin
