"""The one global."""

from __future__ import annotations

import subprocess
import sys


def test_a_fresh_process_has_no_session_and_a_neutral_accumulation() -> None:
    script = (
        "from accelerate_cpp.runtime import current\n"
        "print(current.session, current.accumulation.num_steps, current.accumulation.reading.active_loader)"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["None", "1", "None"]
