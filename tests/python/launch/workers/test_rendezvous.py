from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerate_cpp.launch.workers.rendezvous import rendezvous_file


def test_file_opened_through_the_descriptor_is_the_same_file() -> None:
    with rendezvous_file() as descriptor:
        Path(f"/proc/self/fd/{descriptor}").write_bytes(b"rank 0")
        assert os.pread(descriptor, 100, 0) == b"rank 0"


def test_two_files_share_nothing() -> None:
    with rendezvous_file() as first, rendezvous_file() as second:
        assert os.fstat(first).st_ino != os.fstat(second).st_ino


def test_descriptor_is_closed_on_leaving() -> None:
    with rendezvous_file() as descriptor:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
