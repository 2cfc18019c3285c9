"""Threads of Gloo, which the end of the interpreter may find at work."""

from __future__ import annotations

import time
from typing import Any

from processes import start_processes

HELD: list[Any] = []


class Kept:
    """What needs the interpreter for a while when it ends, and tells so."""

    begun = False

    def __del__(self) -> None:
        Kept.begun = True
        until = time.monotonic() + 1
        while time.monotonic() < until:
            pass
        print("let go", flush=True)


def end_while_a_thread_of_gloo_lets_go_of_a_tensor() -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp import PartialState

    state = PartialState(cpu=True, backend="gloo")
    group = dist.new_group()
    HELD.append(group)  # else its end awaits its threads
    tensor: Any = torch.ones(1)
    if state.process_index == 0:
        tensor.kept = Kept()
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        del tensor, work  # the thread has the last reference
    state.wait_for_everyone()
    if state.process_index == 1:
        dist.all_reduce(tensor, group=group)
    while state.process_index == 0 and not Kept.begun:
        time.sleep(0.001)


def test_the_end_of_a_program_awaits_what_threads_of_gloo_let_go_of() -> None:
    first, _ = start_processes(end_while_a_thread_of_gloo_lets_go_of_a_tensor, 2, finalize=True)
    assert (first.exit_code, first.stdout) == (0, "let go\n"), first.stderr
