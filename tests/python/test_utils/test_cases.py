"""Test cases of unittest."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from unittest import mock

import pytest

from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.gradient_state import GradientState
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.test_utils.cases import AccelerateTestCase, MockingTestCase, TempDirTestCase


def run(case: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun > 0
    assert (result.errors, result.failures) == ([], [])


@pytest.mark.parametrize(("clears", "found"), [(True, [0, 0]), (False, [0, 3])])
def test_the_tests_of_a_class_share_a_folder_that_goes_with_the_last(clears: bool, found: list[int]) -> None:
    seen: list[int] = []
    folders: set[Path] = set()

    class Case(TempDirTestCase):
        clear_on_setup = clears

        def use(self) -> None:
            seen.append(len(list(self.tmpdir.iterdir())))
            folders.add(self.tmpdir)
            if not seen[-1]:
                (self.tmpdir / "file").write_text("x")
                (self.tmpdir / "folder" / "inner").mkdir(parents=True)
                (self.tmpdir / "link").symlink_to(Path(__file__).parent)

        def test_one(self) -> None:
            self.use()

        def test_two(self) -> None:
            self.use()

    run(Case)
    assert seen == found
    assert len(folders) == 1
    assert not folders.pop().exists()
    assert Path(__file__).exists()  # a link is removed, and not what it leads to


def test_every_test_forgets_its_states() -> None:
    found: list[tuple[bool, int]] = []

    class Case(AccelerateTestCase):
        def look(self) -> None:
            found.append((current.session is None, GradientState().num_steps))
            AcceleratorState(cpu=True)
            current.accumulation.num_steps = 4

        def test_one(self) -> None:
            self.look()

        def test_two(self) -> None:
            self.look()

    AcceleratorState._reset_state(reset_partial_state=True)
    run(Case)
    assert found == [(True, 1), (True, 1)]
    assert current.session is None


def test_mocks_end_with_the_test() -> None:
    found: list[tuple[str, str]] = []
    before = (os.getcwd(), os.getlogin)

    class Case(MockingTestCase):
        def setUp(self) -> None:
            self.add_mocks([mock.patch("os.getcwd", return_value="here")])
            self.add_mocks(mock.patch("os.getlogin", return_value="me"))

        def test_it(self) -> None:
            found.append((os.getcwd(), os.getlogin()))

    run(Case)
    assert found == [("here", "me")]
    assert (os.getcwd(), os.getlogin) == before
