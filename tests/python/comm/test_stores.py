"""A process that has no descriptor left ends as it would have with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from accelerate_cpp.comm.stores import kept

PROGRAM = """
import os, resource, sys
import torch.distributed as dist
from accelerate_cpp.comm.stores import DESCRIPTORS, kept

store = dist.FileStore(f"{DESCRIPTORS}{os.memfd_create('store')}", 1)
if sys.argv[1] == "store":
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
def test_a_store_does_not_end_a_process_without_descriptors(which: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, which], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr


def test_a_file_of_the_user_is_removed_with_its_store(tmp_path: Path) -> None:
    store = kept(dist.FileStore(str(tmp_path / "store"), 1))
    store.set("key", "value")
    assert (tmp_path / "store").exists()
    del store
    assert not (tmp_path / "store").exists()
