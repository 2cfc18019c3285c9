"""What all tests with several processes need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults import end_zygote
from rank_process import end_zygotes


@pytest.fixture(scope="session", autouse=True)
def _zygotes_serve_all_tests() -> Iterator[None]:
    yield
    end_zygotes()


@pytest.fixture(scope="module", autouse=True)
def _no_process_outlives_these_tests() -> Iterator[None]:
    yield
    end_zygote()
