"""A process that has no descriptor left ends as it would have with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
import torch.distributed as dist
from accelerate_cpp.comm.file_stores import kept

store = dist.FileStore(sys.argv[1], 1)
if sys.argv[2] == "store":
    stores = [kept(store)]
else:
    stores = [kept(store), kept(dist.PrefixStore("a", store).clone())]
stores[-1].set("key", "value")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
store = None
stores.clear()
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="launches elsewhere have no store in a file")
@pytest.mark.parametrize("which", ["store", "clone"])
def test_a_store_does_not_end_a_process_without_descriptors(which: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
