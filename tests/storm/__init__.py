"""A storm of faults: runs of two to four processes, each hit once by something bad, and judged: ``make storm``."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# What tests with real processes share, and the notebooks' kernel.
for _path in (str(ROOT / "tests" / "distributed"), str(ROOT / "notebooks")):
    if _path not in sys.path:
        sys.path.append(_path)
