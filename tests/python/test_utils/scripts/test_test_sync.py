"""The checks of synchronisation find what is wrong, and pass where all is well, in one process."""

from __future__ import annotations

import pytest

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils import test_sync

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_one_process_passes(capsys: pytest.CaptureFixture[str]) -> None:
    test_sync.main()
    assert capsys.readouterr().out.count("passed on 1 process(es)") == len(test_sync.CHECKS)


def test_gradients_that_are_too_large_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "backward", lambda loss: (2 * loss).backward())
    with pytest.raises(RuntimeError, match=r"the gradient in no_sync\(\): expected 1.0, found 2.0"):
        test_sync.without_synchronising(accelerator)
