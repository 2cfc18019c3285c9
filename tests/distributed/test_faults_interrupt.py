"""Ctrl-C in every kind of wait, and the other ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from faults import Raised, await_event, connect, job_folder, limit_waits, meet, raised_by, rank, run_job, tell
from waits import WAITS

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Record = Callable[[str, object], None]
# What is aimed at is a tenth of a second; machines may be busy.
SOON = 20.0
# A thread that sleeps at the same instruction so often, a hundredth of a second apart, is in a call that waits.
LOOKS = 30


def interrupt_when_stuck(sent: list[float]) -> None:
    """Sends this process Ctrl-C as soon as its main thread waits; puts the time into ``sent``."""
    main = threading.main_thread().ident
    assert main is not None

    def sleeps() -> bool:
        """Not one that has no core for a while, and may not have come to its wait."""
        with open("/proc/self/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "S"

    def place() -> tuple[FrameType, int]:
        frame = sys._current_frames()[main]
        return frame, frame.f_lasti

    def watch() -> None:
        same, last = 0, None
        while same < LOOKS:
            time.sleep(0.01)
            now = place()
            same, last = (same + sleeps() if now == last else 0), now
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def interrupted(function: Callable[[], object]) -> tuple[Raised, float]:
    """What ``function`` raises when Ctrl-C is pressed while it waits, and how long that took."""
    sent: list[float] = []

    def wait() -> None:
        interrupt_when_stuck(sent)
        function()

    raised = raised_by(wait)
    return raised, raised.at - sent[0] if sent else float("inf")


def interrupt_rank_0(wait: str) -> tuple[Raised, float] | None:
    dist = connect()
    limit_waits(dist, SOON)
    waiter = WAITS[wait](dist)
    meet("prepared")
    if rank() == 0:
        outcome = interrupted(waiter)
        tell("interrupted")
    else:
        await_event("interrupted", 0)
        outcome = (raised_by(waiter), 0.0) if wait != "receive" else None
    if wait == "receive":  # it concerned nobody else, and the group goes on
        dist.barrier()
    meet("over")
    return outcome


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_and_the_others_learn_of_it(wait: str, record_property: Record) -> None:
    (own, seconds), other = run_job(interrupt_rank_0, 2, wait)
    record_property("seconds", seconds)
    assert own.kind == "KeyboardInterrupt", own
    assert seconds < SOON
    if wait != "receive":
        assert other[0].kind == "PeerLost", other
        assert re.search("rank 0 (failed|withdrew): KeyboardInterrupt", other[0].message), other


def interrupt_while_connecting(missing: int) -> tuple[Raised, float] | None:
    """Forms a group of which one rank never comes."""
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    store = dist.FileStore(str(job_folder() / "store"), 2)
    if rank() == missing:
        return None
    return interrupted(lambda: dist.init_process_group("cpu:shm", store=store, rank=rank(), world_size=2))


@pytest.mark.parametrize("missing", [0, 1])
def test_ctrl_c_ends_the_wait_for_a_rank_that_has_not_come(missing: int, record_property: Record) -> None:
    outcomes = run_job(interrupt_while_connecting, 2, missing)
    own, seconds = outcomes[1 - missing]
    record_property("seconds", seconds)
    assert own.kind == "KeyboardInterrupt", own
    assert seconds < SOON
