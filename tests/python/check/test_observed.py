"""What watchers share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate_cpp.check.journal import read_journals
from accelerate_cpp.check.observed import CheckFinished, Observed


def test_a_finding_is_written_once_for_each_place(observed: Observed, tmp_path: Path) -> None:
    for where in ("a.py:1", "a.py:1", "a.py:2"):
        observed.find("note", "code", "what", where=where)
    assert [record["where"] for record in read_journals(tmp_path)[0]] == ["a.py:1", "a.py:2"]


def test_what_a_wrapper_holds_counts_as_prepared(observed: Observed) -> None:
    inner, other = object(), object()
    observed.accelerators[0]._optimizers.append(SimpleNamespace(optimizer=inner))
    observed.accelerators[0]._schedulers.append(SimpleNamespace(scheduler=inner))
    assert observed.is_prepared_optimizer(inner)
    assert observed.is_prepared_scheduler(inner)
    assert not observed.is_prepared_optimizer(other)
    assert not observed.is_prepared_scheduler(other)


def test_the_end_of_a_check_passes_by_what_catches_exceptions() -> None:
    with pytest.raises(SystemExit) as left:
        try:
            raise CheckFinished("enough")
        except Exception:
            pytest.fail("caught as an error")
    assert left.value.code == 0
