"""The checks of operations find what is wrong, and pass where all is well, in one process."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils import test_ops

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_one_process_passes(capsys: pytest.CaptureFixture[str]) -> None:
    test_ops.main()
    assert capsys.readouterr().out.count("passed on 1 process(es)") == len(test_ops.CHECKS)


def test_rows_that_were_not_gathered_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_ops, "gather", lambda rows: torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"the rows that gather\(\) collects: expected \[1.0, 2.0, 3.0\], found"):
        test_ops.gathered_tensors(Accelerator(cpu=True))
