"""The checks of metrics find samples that count twice, and pass where all is well, in one process."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts.external_deps import test_metrics

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_one_process_passes(capsys: pytest.CaptureFixture[str]) -> None:
    test_metrics.main()
    assert capsys.readouterr().out.count("passed on 1 process(es)") == 4 * len(test_metrics.SAMPLES)


def test_a_sample_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    twice = lambda data, **options: data if options else (data[0], torch.cat([data[1], data[1][:1]]))  # noqa: E731
    monkeypatch.setattr(accelerator, "gather_for_metrics", twice)
    with pytest.raises(RuntimeError, match=r"the samples that gather_for_metrics\(\) collects of 3"):
        test_metrics.evaluated(accelerator, 3)
