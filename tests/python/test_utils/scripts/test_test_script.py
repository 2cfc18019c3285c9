"""The checks of accelerate-cpp test find what is wrong. That they pass where all is well, tests of the command show."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts import test_script

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_what_was_not_gathered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "gather", lambda tensor: tensor + 1)
    with pytest.raises(RuntimeError, match=r"gather\(\) collects: expected \[0\], found \[1\]"):
        test_script.communication(accelerator)


def test_a_sample_that_is_seen_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "gather_for_metrics", lambda batch: torch.cat([batch, batch[:1]]))
    with pytest.raises(RuntimeError, match="samples seen with shuffle=False"):
        test_script.data(accelerator)


def test_weights_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "backward", lambda loss: (2 * loss).backward())
    with pytest.raises(RuntimeError, match=r"differ by .* from those of one process"):
        test_script.training(accelerator)
