"""What checks of scripts raise with, and how they are run."""

from __future__ import annotations

import pytest

from accelerate_cpp import Accelerator
from accelerate_cpp.test_utils.scripts.required import require, run

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_what_is_found_has_to_be_what_was_expected() -> None:
    require("the sum", 3, 3)
    with pytest.raises(RuntimeError, match="the sum: expected 3, found 4"):
        require("the sum", 3, 4)


def test_each_check_that_passes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def looked(accelerator: Accelerator) -> None:
        assert accelerator.num_processes == 1

    run(Accelerator(cpu=True), [looked])
    assert capsys.readouterr().out == "looked: passed on 1 process(es)\n"
