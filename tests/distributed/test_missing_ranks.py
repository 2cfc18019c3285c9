"""Rank 0, which holds the store of a run on several machines, says who has not come."""

from __future__ import annotations

from datetime import timedelta

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.


def joined() -> str:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.errors import Timeout
    from accelerate_cpp.utils import InitProcessGroupKwargs

    try:
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=10))])
    except Timeout as error:
        return str(error)
    return "has joined"


def test_missing_rank_is_named_when_the_timeout_is_over() -> None:
    [message] = run_processes(joined, 1, environment={"WORLD_SIZE": "3"})
    assert message.startswith("forming a group of 3 ranks: rank 0 waited ")
    assert message.endswith(" s for rank 1, which did not answer; check that all ranks were started")
