"""Threads of Gloo, which the end of the interpreter may find at work."""

from __future__ import annotations

from faults import connect, run_job

PASSES = 40


def train_over_gloo() -> tuple[int, int]:
    """How often objects that torch keeps with a backward pass ended with a thread of Gloo, and how often at all."""
    import contextvars
    import threading
    from types import SimpleNamespace

    import torch

    from accelerate_cpp import Accelerator

    connect(backend="gloo")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    ended_by: list[int] = []

    class Kept:
        def __del__(self) -> None:
            ended_by.append(threading.get_ident())

    torch.autograd.graph.contextvars = SimpleNamespace(copy_context=Kept)  # type: ignore[attr-defined]
    try:
        for _ in range(PASSES):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            accelerator.wait_for_everyone()
    finally:
        torch.autograd.graph.contextvars = contextvars  # type: ignore[attr-defined]
    return sum(thread != threading.main_thread().ident for thread in ended_by), len(ended_by)


def test_no_thread_of_gloo_needs_the_interpreter_after_a_backward_pass() -> None:
    for by_others, all_ended in run_job(train_over_gloo, 2):
        assert by_others == 0
        assert PASSES / 2 < all_ended < PASSES  # what the last passes had is kept, that of others is not
