"""Memory from the system for the states of checkpoints."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from accelerate_cpp.checkpoint.memory import fresh_memory

_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """What the kernel notes of the mapping at ``address``."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            found = begin <= address < end
        elif found and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


def test_memory_is_zero_and_belongs_to_this_process_alone() -> None:
    block = fresh_memory(3)
    assert bytes(block) == bytes(3)
    child = os.fork()
    if child == 0:
        block[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(block) == bytes(3)


@pytest.mark.skipif(not _LARGE_PAGES.is_file(), reason="this kernel has no large pages to ask for")
def test_large_pages_are_asked_for() -> None:
    block = torch.frombuffer(fresh_memory(8 << 20), dtype=torch.uint8)
    assert "hg" in flags_at(block.data_ptr())


def test_a_system_without_large_pages_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(mmap.mmap):
        def madvise(self, *_arguments: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Without)
    assert len(fresh_memory(5)) == 5
