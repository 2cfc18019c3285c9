"""What /proc tells of a process: each thing that it holds is counted, and no longer when it is given back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from measures import measured

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

BYTES = 16 << 20


def touch(mapping: mmap.mmap) -> None:
    """Writes to each page of it, and needs no other memory."""
    for offset in range(0, BYTES, mmap.PAGESIZE):
        mapping[offset] = 1


@contextmanager
def descriptor() -> Iterator[None]:
    file = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(file)


@contextmanager
def memory_file() -> Iterator[None]:
    file = os.memfd_create("endurance")
    os.truncate(file, BYTES)
    with mmap.mmap(file, BYTES) as mapping:
        os.close(file)
        touch(mapping)
        yield


@contextmanager
def named_memory() -> Iterator[None]:
    path = Path(f"/dev/shm/endurance.{os.getpid()}")
    path.touch()
    yield
    path.unlink()


@contextmanager
def thread() -> Iterator[None]:
    ends = threading.Event()
    waiting = threading.Thread(target=ends.wait)
    waiting.start()
    yield
    ends.set()
    waiting.join()


@contextmanager
def child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        yield


@contextmanager
def anonymous_memory() -> Iterator[None]:
    with mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        touch(mapping)
        yield


@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        (descriptor, {"descriptors": 1}),
        (memory_file, {"memory_files": 1, "mappings": 1, "shared_bytes": BYTES}),
        (thread, {"threads": 1}),
        (child, {"children": 1}),
        (anonymous_memory, {"anonymous_bytes": BYTES}),
    ],
)
def test_what_is_held_is_counted_while_it_is(
    hold: Callable[[], AbstractContextManager[None]], expected: dict[str, int], tmp_path: Path
) -> None:
    before = measured(os.getpid(), tmp_path)
    with hold():
        during = measured(os.getpid(), tmp_path)
    after = measured(os.getpid(), tmp_path)
    for name, added in expected.items():
        play = BYTES // 4 if name.endswith("_bytes") else 0
        assert abs(during[name] - before[name] - added) <= play, name
        assert abs(after[name] - before[name]) <= play, name


def test_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with named_memory():
        now = measured(os.getpid(), tmp_path)
    assert now["temporary_files"] == 2
    assert now["named_memory"] >= 1
