"""A rank that is merely late: who waits for it says so once, in one sentence, and then all goes on."""

from __future__ import annotations

import logging
import re

import pytest

from faults import Raised, await_event, await_true, connect, job_folder, meet, raised_by, rank, run_job, tell
from waits import WAITS

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SLOW = {"ACCELERATE_CPP_SLOW_WAIT_SECONDS": "1"}


class Listener(logging.Handler):
    """Collects what is logged, and tells the other ranks when the first sentence has come."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.sentences.append(record.getMessage())
        tell("logged")


def listen() -> Listener:
    listener = Listener()
    logging.getLogger("accelerate_cpp.comm").addHandler(listener)
    return listener


def rank_1_is_late(wait: str) -> tuple[list[str], Raised]:
    """Rank 1 comes when rank 0 has logged that it waits."""
    dist = connect()
    listener = listen()
    waiter = WAITS[wait](dist)
    meet("prepared")
    if rank() == 1:
        await_event("logged", 0)
    raised = raised_by(waiter)
    meet("over")
    return listener.sentences, raised


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait != "receive"])
def test_a_late_rank_is_reported_once_and_then_all_goes_on(wait: str) -> None:
    (sentences, own), (_, other) = run_job(rank_1_is_late, 2, wait, environment=SLOW)
    assert own.kind == other.kind == "nothing", (own, other)
    assert len(sentences) == 1, sentences
    assert "rank 0 waited for rank 1" in sentences[0]
    assert re.search(r"waits\.py:\d+", sentences[0])
    assert "rank 1 " in sentences[0].split("\n")[-1]


def receive_late() -> list[str]:
    import torch

    dist = connect()
    listener = listen()
    if rank() == 0:
        data = torch.empty(4)
        dist.recv(data, 1)
        assert data.tolist() == [1, 1, 1, 1]
    else:
        await_event("logged", 0)
        dist.send(torch.ones(4), 0)
    meet("over")
    return listener.sentences


def test_a_late_message_is_reported_once_and_then_received() -> None:
    sentences, _ = run_job(receive_late, 2, environment=SLOW)
    assert len(sentences) == 1, sentences
    assert "receive of 4 float32 from rank 1" in sentences[0]
    assert re.search(r"test_faults_late\.py:\d+", sentences[0])


def form_a_group_late(late: int) -> list[str]:
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    listener = listen()
    register()
    store = dist.FileStore(str(job_folder() / "store"), 2)
    if rank() == late:
        await_event("logged", 1 - late)
    dist.init_process_group("cpu:shm", store=store, rank=rank(), world_size=2)
    dist.barrier()
    return listener.sentences


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_for_the_group_is_reported_once(late: int) -> None:
    sentences = run_job(form_a_group_late, 2, late, environment=SLOW)
    assert sentences[late] == []
    [sentence] = sentences[1 - late]
    assert f"a group of 2 ranks: rank {1 - late} waited" in sentence
    assert f"for rank {late}" in sentence


def test_nothing_is_reported_when_nobody_is_to_be_told() -> None:
    sentences, _ = run_job(wait_quietly, 2, environment={"ACCELERATE_CPP_SLOW_WAIT_SECONDS": "0"})
    assert sentences == []


def wait_quietly() -> list[str]:
    dist = connect()
    listener = listen()
    if rank() == 1:
        with pytest.raises(AssertionError):
            await_true(lambda: False, "long enough for a report that is due at once", 0.3)
    dist.barrier()
    return listener.sentences
