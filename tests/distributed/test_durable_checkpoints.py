"""A checkpoint that can be seen survives a power failure: the system calls of a save, in their order, show it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from killed_saves import ENGINES, SHARDED

pytest.importorskip("torch")

CALLS = "open,openat,creat,write,writev,pwrite64,ftruncate,fsync,fdatasync,mkdir,mkdirat,link,linkat,symlink,symlinkat"
CALLS += ",rename,renameat,renameat2,unlink,unlinkat,rmdir,sendfile,copy_file_range"
STRACE = ["strace", "--follow-forks", "--seccomp-bpf", "--decode-fds=path", "--string-limit=4096", f"--trace={CALLS}"]
PATIENCE_SECONDS = 600
LINE = re.compile(r"(?P<process>\d+) +(?P<rest>.*)")
FINISHED = re.compile(r"(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\w+)")
UNFINISHED, RESUMED = re.compile(r"(\w+\(.*)<unfinished \.\.\.>"), re.compile(r"<\.\.\. \w+ resumed>(.*)")
NAMED, OPEN = re.compile(r'(?:\w+<([^>]*)>, )?"((?:[^"\\]|\\.)*)"'), re.compile(r"\d+<([^>]*)>")


def may_trace() -> bool:
    """Whether there is strace, and this machine lets it look."""
    return bool(shutil.which("strace")) and subprocess.run([*STRACE, "true"], capture_output=True).returncode == 0


def calls_in(trace: Path) -> Iterator[tuple[str, str]]:
    """Name and arguments of each call that succeeded, in the order in which they returned."""
    begun: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        process, rest = match["process"], match["rest"]
        if half := UNFINISHED.match(rest):
            begun[process] = half[1]
            continue
        if half := RESUMED.match(rest):
            rest = begun.pop(process, "") + half[1]
        call = FINISHED.match(rest)
        if call is not None and not call["result"].startswith("-"):
            yield call["call"], call["arguments"]


class Disk:
    """What of ``folder`` would not be there after a power failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lost: set[Path] = set()
        self.moved: list[Path] = []
        self.synced = 0

    def see(self, call: str, arguments: str) -> None:
        """Takes note of a call; raises ``AssertionError`` if it shows a checkpoint that could be lost."""
        paths = [Path(folder or "/", name) for folder, name in NAMED.findall(arguments)]
        held = [Path(name) for name in OPEN.findall(arguments)]
        if call.startswith(("fsync", "fdatasync")):
            self.lost.discard(held[0])
            self.synced += self._is_inside(held[0])
        elif call.startswith(("write", "pwrite", "ftruncate", "sendfile", "copy_file")):
            self._change(*(held[-1:] if call == "copy_file_range" else held[:1]))
        elif call.startswith(("mkdir", "link", "symlink", "unlink", "rmdir")):
            self._change(paths[-1].parent)
            if call.startswith("unlink"):  # nothing of it is to be on the disk
                self.lost.discard(paths[-1])
        elif call.startswith(("open", "creat")) and "O_CREAT" in arguments:
            self._change(paths[0], paths[0].parent)
        elif call.startswith("rename"):
            self._rename(*paths)

    def _rename(self, source: Path, target: Path) -> None:
        if not self._is_inside(target):
            return
        if not target.name.startswith("."):
            self.moved.append(target)
            exposed = [path for path in self.lost if path == source or source in path.parents]
            assert not exposed, f"{target} can be seen, and these can still be lost: {exposed}"
        elif not source.name.startswith("."):
            assert source.parent not in self.lost, f"{source} is removed while the name of its successor can be lost"
        self.lost -= {path for path in self.lost if target.name.startswith(".") and source in (path, *path.parents)}
        self._change(source.parent, target.parent)

    def _change(self, *paths: Path) -> None:
        self.lost |= {path for path in paths if self._is_inside(path)}

    def _is_inside(self, path: Path) -> bool:
        return path == self._folder or self._folder in path.parents


def traced(folder: Path, layout: str, blocking: str) -> Disk:
    """The disk after a run that saves twice and keeps the second checkpoint."""
    project, trace = folder / "new" / "project", folder / "trace"
    program = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    program += [str(Path(__file__).with_name("saved_once.py")), layout, str(project), blocking]
    command = [*STRACE, f"--output={trace}", *program]
    subprocess.run(command, check=True, timeout=PATIENCE_SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    disk = Disk(folder)
    for call, arguments in calls_in(trace):
        disk.see(call, arguments)
    assert sorted(path.name for path in (project / "checkpoints").iterdir()) == ["checkpoint_1"]
    return disk


@pytest.mark.long
@pytest.mark.skipif(not may_trace(), reason="strace is not installed, or may not trace here")
@pytest.mark.parametrize("blocking", ["blocking", "in the background"])
@pytest.mark.parametrize("layout", [*SHARDED, ENGINES[1]])
def test_what_can_be_seen_is_on_the_disk(tmp_path: Path, layout: str, blocking: str) -> None:
    if layout in ENGINES and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    disk = traced(tmp_path, layout, blocking)
    assert [path.name for path in disk.moved] == ["checkpoint_0", "checkpoint_1"]
    assert disk.synced > 10
    left = {path for path in disk.lost if path.exists()}
    assert left <= {tmp_path / "new" / "project" / "checkpoints"}, "names of what was removed may come back, no others"
