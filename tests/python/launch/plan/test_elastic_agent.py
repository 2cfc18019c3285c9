from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan import elastic_agent
from accelerate_cpp.launch.plan.elastic_agent import agent_command
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, resolve
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers import exec_with_parent as tied

torchrun = pytest.importorskip("torch.distributed.run")


def _plan(tmp_path: Path, **options: object) -> LaunchPlan:
    (tmp_path / "train.py").touch()
    several = {"cpu": True, "num_machines": 2, "num_processes": 4, "main_process_ip": "head"} | options
    return resolve(LaunchOptions(str(tmp_path / "train.py"), ("--lr", "1"), **several), {})  # type: ignore[arg-type]


def _agent(plan: LaunchPlan) -> object:
    """The agent's command as torchrun reads it."""
    assert plan.agent is not None
    command = agent_command(plan, plan.agent)
    assert command[:4] == module_program("torch.distributed.run")
    return torchrun.get_args_parser().parse_args(command[4:])


def test_other_rendezvous_is_the_agents(tmp_path: Path) -> None:
    plan = _plan(tmp_path, rdzv_backend="c10d", rdzv_conf="timeout=900", role="trainer")
    told = _agent(plan)
    assert (told.nnodes, told.nproc_per_node) == ("2", "2")
    assert (told.rdzv_backend, told.rdzv_endpoint, told.rdzv_conf) == ("c10d", "head:29500", "timeout=900")
    assert told.role == "trainer"
    assert told.training_script == tied.__file__
    assert told.training_script_args == [sys.executable, str(tmp_path / "train.py"), "--lr", "1"]


def test_machine_with_rank_0_holds_the_store_where_ranks_were_said(tmp_path: Path) -> None:
    conf = [
        _agent(_plan(tmp_path, rdzv_backend="c10d", **said)).rdzv_conf  # type: ignore[attr-defined]
        for said in ({"machine_rank": 0, "rdzv_conf": "a=1"}, {"machine_rank": 1}, {})
    ]
    assert conf == ["a=1,is_host=true", "is_host=false", ""]


def test_restarts_over_several_machines_are_the_agents(tmp_path: Path) -> None:
    told = _agent(_plan(tmp_path, max_restarts=3, machine_rank=1, main_process_port=1234, monitor_interval=0.5))
    assert (told.max_restarts, told.monitor_interval) == (3, 0.5)
    assert (told.rdzv_backend, told.rdzv_endpoint, told.rdzv_conf) == ("c10d", "head:1234", "is_host=false")


def test_a_folder_for_logs_gets_them(tmp_path: Path) -> None:
    told = [
        _agent(_plan(tmp_path, rdzv_backend="c10d", **said))
        for said in ({}, {"log_dir": "logs"}, {"log_dir": "logs", "tee": "0:1,1:2"})
    ]
    assert [one.tee for one in told] == ["0", "3", "0:1,1:2"]  # type: ignore[attr-defined]


def test_the_agent_ends_with_the_input_of_the_launch_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(elastic_agent, "end_next_program_with_stdin", lambda: done.append("watched"))
    monkeypatch.setattr(os, "execve", lambda *of_agent: done.append("became the agent"))
    for ends_with_stdin in (False, True):
        plan = _plan(tmp_path, rdzv_backend="c10d", ends_with_stdin=ends_with_stdin)
        assert plan.agent is not None
        elastic_agent.become_agent(plan, plan.agent)
    assert done == ["became the agent", "watched", "became the agent"]


def test_one_machine_and_a_static_rendezvous_need_no_agent(tmp_path: Path) -> None:
    assert _plan(tmp_path).agent is None
    assert _plan(tmp_path, num_machines=1, rdzv_backend="c10d", max_restarts=3).agent is None
