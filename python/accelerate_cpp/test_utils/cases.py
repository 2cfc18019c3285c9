"""Test cases of unittest: with a folder of their own, with states that are forgotten, with mocks that end."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

from accelerate_cpp.runtime.gradient_state import GradientState
from accelerate_cpp.state import AcceleratorState

__all__ = ["AccelerateTestCase", "MockingTestCase", "TempDirTestCase"]


class TempDirTestCase(unittest.TestCase):
    """The tests of a class share a folder, which is removed after the last one.

    Attributes:
        tmpdir: the folder.
        clear_on_setup: whether it is emptied before each test.
    """

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Makes the folder."""
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Removes the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        """Empties the folder, if ``clear_on_setup`` says so."""
        super().setUp()
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Each test finds no session and no state of an earlier one."""

    def tearDown(self) -> None:
        """Forgets all states."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Mocks that hold during a test."""

    def add_mocks(self, mocks: Any) -> None:
        """Starts a patcher of ``unittest.mock``, or each of a list; they end with the test."""
        for mock in mocks if isinstance(mocks, (list, tuple)) else [mocks]:
            mock.start()
            self.addCleanup(mock.stop)
