"""What all tests with several processes need."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import pytest

from launched import STARTED
from network_namespaces import Host, Unavailable, two_hosts
from rank_process import may_be_forked


@pytest.fixture(scope="module", autouse=True)
def _warns_of_interpreters() -> None:
    if sys.platform == "linux" and not may_be_forked({**os.environ, "OMP_NUM_THREADS": "1"}):
        warnings.warn(
            "an earlier test, or a library that it has imported, has changed a variable that torch reads at its start, "
            "so that each process of these tests is a new interpreter, which takes seconds",
            stacklevel=1,
        )


@pytest.fixture
def no_launcher_is_left() -> Iterator[None]:
    yield
    for launcher in STARTED:
        launcher.kill()
        launcher.communicate()
    STARTED.clear()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces of this machine; tests that ask for them are skipped where it gives none."""
    try:
        with two_hosts() as both:
            yield both
    except Unavailable as reason:
        pytest.skip(f"two hosts cannot be made of this machine: {reason}")
