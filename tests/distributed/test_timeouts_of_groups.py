"""Groups that are made of a part of all processes have the timeout that the program gave to the group of all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from processes import run_processes

CHOSEN = timedelta(seconds=77)


def _timeouts(kind: str, backend: str) -> list[timedelta | None]:
    """Those of all groups that there are, but for the group of all."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.checkpoint.background import BackgroundWriter
    from accelerate_cpp.checkpoint.writers_group import WRITERS_GROUP
    from accelerate_cpp.comm.timeouts import timeout_of
    from accelerate_cpp.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    arguments: dict[str, Any] = {"kwargs_handlers": [InitProcessGroupKwargs(timeout=CHOSEN, backend=backend)]}
    if kind == "pipeline":
        arguments["parallelism_config"] = ParallelismConfig(pp_size=2, dp_replicate_size=2)
    elif kind == "copies of shards":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    run = Accelerator(cpu=True, **arguments)
    if kind == "copies of shards":
        run.prepare(torch.nn.Linear(4, 4))
    if kind == "writers":
        WRITERS_GROUP.of(BackgroundWriter())
    parts = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    assert timeout_of(dist.group.WORLD, torch.device("cpu")) == CHOSEN  # type: ignore[arg-type]
    before = distributed_c10d.default_pg_timeout
    own = dist.new_group([0, 1])  # of the program, which torch answers for
    if run.process_index < 2:
        assert timeout_of(own, torch.device("cpu")) == before == timedelta(minutes=30)
    found = [timeout_of(group, torch.device("cpu")) for group in parts]
    run.wait_for_everyone()  # rank 0 has the store, in which others may still form a group
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("kind", ["pipeline", "copies of shards", "writers"])
def test_parts_of_all_have_its_timeout(kind: str, backend: str) -> None:
    for found in run_processes(_timeouts, 4, kind, backend):
        assert found, "there is a group"
        assert set(found) == {CHOSEN}
