from __future__ import annotations

import os
from dataclasses import replace

import pytest

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.plan import environment
from accelerate_cpp.launch.plan.environment import (
    ElasticSteps,
    WorkerGroup,
    become_worker,
    exported,
    group_environment,
    threads_per_worker,
    worker_environment,
)
from accelerate_cpp.launch.plan.machines import Launchers

GROUP = WorkerGroup(
    num_processes=3, cpu=True, mixed_precision="no", num_threads=5, master_addr="127.0.0.1", master_port=4321
)


def test_worker_is_told_its_rank_its_group_and_where_they_meet() -> None:
    assert worker_environment(GROUP, 2, 7, {"HOME": "/there"}) == {
        "HOME": "/there",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "ACCELERATE_CPP_RENDEZVOUS_FD": "7",
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_MIXED_PRECISION": "no",
        "OMP_NUM_THREADS": "5",
        "KMP_BLOCKTIME": "1",
    }


def test_lone_worker_is_told_of_no_group() -> None:
    outer = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "ACCELERATE_CPP_RENDEZVOUS_FD": "9"}
    outer |= {"ACCELERATE_CPP_BOARD": "8:1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told = worker_environment(replace(GROUP, num_processes=1), 0, 7, outer)
    assert told.keys() == {
        "ACCELERATE_USE_CPU",
        "ACCELERATE_MIXED_PRECISION",
        "OMP_NUM_THREADS",
        "KMP_BLOCKTIME",
        "KMP_AFFINITY",
    }


def test_threads_of_intels_openmp_are_bound_where_no_other_worker_is_bound_to_the_same_cores() -> None:
    binding = "granularity=fine,compact,1,0"
    assert "KMP_AFFINITY" not in worker_environment(GROUP, 0, 7, {})
    pinned = replace(GROUP, shares=((0,), (1,), (2,)))
    assert worker_environment(pinned, 0, 7, {})["KMP_AFFINITY"] == binding
    assert worker_environment(pinned, 0, 7, {"KMP_AFFINITY": "none"})["KMP_AFFINITY"] == "none"
    assert "KMP_BLOCKTIME" not in worker_environment(replace(GROUP, cpu=False), 0, 7, {})


def test_workers_on_the_gpu_of_a_mac_fall_back_to_the_cpu_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = replace(GROUP, num_processes=1, cpu=False)
    assert "PYTORCH_ENABLE_MPS_FALLBACK" not in group_environment(alone, {})
    monkeypatch.setattr(environment.platform, "system", lambda: "Darwin")
    assert group_environment(alone, {})["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    chosen = {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}
    assert group_environment(alone, chosen)["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"
    assert "PYTORCH_ENABLE_MPS_FALLBACK" not in group_environment(GROUP, {})


def test_workers_of_a_launcher_are_numbered_after_those_of_the_launchers_before_it() -> None:
    launchers = Launchers(count=4, rank=3, local_count=2, local_rank=1, address="10.0.0.1")
    group = replace(GROUP, launchers=launchers, master_addr="10.0.0.1")
    told = worker_environment(group, 2, 7, {})
    assert (told["RANK"], told["WORLD_SIZE"]) == ("11", "12")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("5", "6")
    assert "ACCELERATE_CPP_RENDEZVOUS_FD" not in told
    assert list(group.ranks) == [9, 10, 11]


def test_restarted_worker_is_told_how_often() -> None:
    told = worker_environment(GROUP, 0, 7, {}, restarts=(2, 3))
    assert (told["TORCHELASTIC_RESTART_COUNT"], told["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")
    assert "TORCHELASTIC_RESTART_COUNT" not in worker_environment(GROUP, 0, 7, {"TORCHELASTIC_RESTART_COUNT": "1"})


def test_settings_that_were_asked_for_reach_the_worker() -> None:
    group = replace(GROUP, debug=True, gradient_accumulation_steps=4, gpu_ids="1,3", fork_launched=True)
    told = worker_environment(group, 0, 7, {})
    assert told["ACCELERATE_DEBUG_MODE"] == "true"
    assert told["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert told["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert told["FORK_LAUNCHED"] == "true"


def test_workers_of_an_elastic_run_know_its_full_size_and_no_secret() -> None:
    elastic = replace(GROUP, launchers=Launchers(3, 1, address="10.0.0.1"), elastic=ElasticSteps(9, "sqrt"))
    told = group_environment(elastic, {"ACCELERATE_CPP_RUN_SECRET": "open sesame"})
    assert (told["ACCELERATE_CPP_FULL_WORLD_SIZE"], told["ACCELERATE_CPP_ELASTIC_LR"]) == ("9", "sqrt")
    assert "open sesame" not in told.values()
    inner = group_environment(GROUP, told)
    assert not {"ACCELERATE_CPP_FULL_WORLD_SIZE", "ACCELERATE_CPP_ELASTIC_LR"} & inner.keys()


def test_alias_is_handed_on_only_where_it_was_asked_for() -> None:
    asked = replace(GROUP, alias=True)
    assert group_environment(asked, {})["ACCELERATE_CPP_ALIAS"] == "1"
    assert "ACCELERATE_CPP_ALIAS" not in group_environment(GROUP, {})


def test_threads_are_as_asked_then_as_inherited_then_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.host_resources, "usable_cores", lambda: 8)
    assert threads_per_worker(2, 3, {"OMP_NUM_THREADS": "6"}) == 3
    assert threads_per_worker(2, None, {"OMP_NUM_THREADS": "6"}) == 6
    assert threads_per_worker(3, None, {}) == 2
    assert threads_per_worker(16, None, {}) == 1


def test_pinned_workers_have_no_more_threads_than_the_smallest_share_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.host_resources, "usable_cores", lambda: 9)
    shares = ((0, 1, 2, 3, 4), (5, 6), (7, 8))
    assert threads_per_worker(3, None, {}, shares) == 2
    assert threads_per_worker(3, 4, {}, shares) == 4
    assert threads_per_worker(3, None, {"OMP_NUM_THREADS": "6"}, shares) == 6
    monkeypatch.setattr(environment.host_resources, "usable_cores", lambda: 3)  # a quota
    assert threads_per_worker(3, None, {}, shares) == 1


def test_pinned_workers_are_told_so_and_which_cores_they_share_out() -> None:
    group = replace(GROUP, shares=((0, 4), (1, 5), (2, 3)))
    told = worker_environment(group, 1, 7, {})
    assert (told["ACCELERATE_CPU_AFFINITY"], told["ACCELERATE_CPP_CORES"]) == ("1", "0-5")
    assert group.cores_of(1) == (1, 5)


def test_workers_that_are_not_pinned_hear_nothing_of_an_outer_launch_whose_workers_were() -> None:
    told = worker_environment(GROUP, 1, 7, {"ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_CPP_CORES": "0-5"})
    assert told.keys().isdisjoint({"ACCELERATE_CPU_AFFINITY", "ACCELERATE_CPP_CORES"})
    assert GROUP.cores_of(1) == ()


def test_becoming_a_worker_replaces_the_whole_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setenv("WORLD_SIZE", "9")
    try:
        become_worker({"RANK": "1"})
        assert dict(os.environ) == {"RANK": "1"}
    finally:
        become_worker(before)


def test_width_is_passed_on_only_for_a_terminal_and_not_over_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert environment.width_of_terminal() == {}
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((133, 40)))
    assert environment.width_of_terminal() == {"COLUMNS": "133"}
    monkeypatch.setenv("COLUMNS", "70")
    assert environment.width_of_terminal() == {}


def test_exported_values_last_as_long_as_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with exported({env_table.MIXED_PRECISION: "fp16", env_table.USE_CPU: True}):
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
        assert os.environ["ACCELERATE_USE_CPU"] == "True"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_CPU" not in os.environ
