"""The project builds anywhere: no file names a path of one machine or a package registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import portability
from tree import REPOSITORY, render


def test_no_machine_path_and_no_registry_in_the_project() -> None:
    found = list(portability.violations(REPOSITORY))
    assert not found, render(found)


@pytest.mark.parametrize(
    "text", ["see /" + "work/main\n", "cd /" + "root/x\n", '"/' + 'home/me"\n', "pip -i https://py" + "pi.org/simple\n"]
)
def test_a_planted_path_or_host_is_found(text: str, plant: Callable[[str, str], Path]) -> None:
    assert len(list(portability.violations(plant("docs/a.md", text)))) == 1


def test_paths_of_every_system_and_relative_ones_are_allowed(plant: Callable[[str, str], Path]) -> None:
    text = "/proc/self/fd/3 /dev/shm/x /tmp/y https://example.com/work/a ./home/b shared/root/c\n"
    assert list(portability.violations(plant("docs/a.md", text))) == []
