"""What every test of this folder needs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_state(fresh_state: None) -> None:
    """No test finds the state, or the precision, of an ``Accelerator`` of the test before."""
