"""How scripts are run, and what becomes of their ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.run import run

Found = Callable[[], dict[str, str]]


@pytest.fixture(autouse=True)
def _main_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.mark.parametrize(
    ("script", "how", "expected"),
    [
        ("import sys\nassert sys.argv[1:] == ['--a', 'b'] and __name__ == '__main__'\n", "end", {}),
        ("raise SystemExit\n", "end", {}),
        ("raise SystemExit('no data')\n", "failed", {"script-failed": "error"}),
        ("[][1]\n", "failed", {"script-failed": "error"}),
        ("from accelerate_cpp.check.observed import CheckFinished\nraise CheckFinished('x')\n", "enough", {}),
        (
            "from accelerate_cpp.errors import MismatchedCollective\nraise MismatchedCollective('a table')\n",
            "failed",
            {"mismatched-collective": "error"},
        ),
        ("from accelerate_cpp.errors import PeerLost\nraise PeerLost('rank 1')\n", "peer", {"lost-peer": "error"}),
        ("from accelerate_cpp.errors import Timeout\nraise Timeout('rank 1')\n", "peer", {"ranks-diverge": "error"}),
        ("raise AssertionError('Torch not compiled with CUDA enabled')\n", "failed", {"hard-coded-device": "error"}),
    ],
)
def test_the_end_of_a_script_says_what_was_wrong(
    observed: Observed, found: Found, tmp_path: Path, script: str, how: str, expected: dict[str, str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    observed.task = replace(observed.task, script=str(path), arguments=("--a", "b"))
    assert run(observed.task, observed) == how
    assert found() == expected


def test_an_interrupt_is_not_a_finding(observed: Observed, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        run(replace(observed.task, script=str(path)), observed)
