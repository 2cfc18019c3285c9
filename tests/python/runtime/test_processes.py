"""What a state does with the processes of a run, as they are told by its properties."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp.runtime.processes import Processes


class Third(Processes):
    """The third of four processes, and the first of its host."""

    num_processes, process_index, local_process_index = 4, 2, 0
    use_distributed, is_main_process, is_local_main_process, is_last_process = True, False, True, False
    device, fork_launched = torch.device("cpu"), True


def test_each_process_gets_its_consecutive_part() -> None:
    with Third().split_between_processes(list(range(6))) as part:
        assert part == [4]
    with Third().split_between_processes([0, 1, 2, 3, 4, 5], apply_padding=True) as part:
        assert part == [4, 5]  # the last of all, as with the original


def test_functions_run_on_the_processes_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    third = Third()

    def rank() -> str:
        return "ran"

    assert third.on_main_process(rank)() is None
    assert third.on_local_main_process(rank)() == "ran"
    assert third.on_last_process(rank)() is None
    assert third.on_process(process_index=2)(rank)() == "ran"
    assert third.on_local_process(rank, local_process_index=1)() is None
    third.print("shown")
    assert capsys.readouterr().out == "shown\n"


def test_the_default_group_of_a_process_that_a_notebook_forked_stays() -> None:
    assert Third().destroy_process_group() is None
