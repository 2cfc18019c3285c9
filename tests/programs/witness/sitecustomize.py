"""On the path of programs that nobody here wrote: each of their processes says at its end which Accelerate it had.

And each keeps torch's Gloo group to the end. Where a program lets go of it at once, as trainers do, its destructor now
and then waits, with the interpreter's lock, for a thread that wants this lock to let go of its last tensor.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any


def _testify() -> None:
    package = sys.modules.get("accelerate")
    if package is not None:
        rank, processes = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
        said = {"processes": processes, "from": package.Accelerator.__module__.partition(".")[0]}
        Path(os.environ["WITNESS_FOLDER"], f"witness-{rank}.json").write_text(json.dumps(said))


def _keep_gloo() -> None:
    import torch.distributed

    destroy = torch.distributed.destroy_process_group

    def keep_and_destroy(group: Any = None) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.distributed.group.WORLD))
        destroy(group)

    torch.distributed.destroy_process_group = keep_and_destroy


atexit.register(_testify)
if os.environ.get("WORLD_SIZE", "1") != "1":
    _keep_gloo()
