"""Lets the tests of this folder import it as the package that it is for ``python -m tests.storm``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
