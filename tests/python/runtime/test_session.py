"""Building a session, and what is left when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.runtime.session import build_session

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def run(script: str, **environ: str) -> str:
    """The output of ``script`` in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environ}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_process_has_no_group_and_the_neutral_strategy() -> None:
    session = build_session(SessionConfig(cpu=True))
    assert session.device == torch.device("cpu")
    assert (session.topology.world_size, session.topology.backend) == (1, None)
    assert isinstance(session.strategy, SingleStrategy)


def test_a_process_is_pinned_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int, list[int | None]]] = []
    monkeypatch.setattr(
        "accelerate_cpp.runtime.session.pin_process",
        lambda rank, size, nodes: pinned.append((rank, size, list(nodes({})))),
    )
    build_session(SessionConfig(cpu=True))
    assert pinned == []
    build_session(SessionConfig(cpu=True, cpu_affinity=True))
    assert pinned == [(0, 1, [])]


@pytest.mark.parametrize("before", ["", "PartialState(cpu=True)"])
def test_floats_of_torch_xla_are_refused_elsewhere_and_leave_no_state(before: str) -> None:
    script = f"""
from accelerate_cpp import Accelerator, PartialState
{before}
for _ in range(2):
    try:
        print(Accelerator(cpu=True, mixed_precision="bf16").state.downcast_bfloat)
    except ValueError as error:
        print(error)
"""
    printed = run(script, ACCELERATE_DOWNCAST_BF16="1")
    assert printed.count("ACCELERATE_DOWNCAST_BF16 (--downcast_bf16) is for TPUs, but this run is on cpu") == 2


def test_a_reconfigured_session_keeps_its_processes_and_device() -> None:
    session = build_session(SessionConfig(cpu=True))
    changed = session.reconfigured(replace(session.config, mixed_precision="no"))
    assert changed.config.mixed_precision == "no"
    assert (changed.topology, changed.device) == (session.topology, session.device)
    assert session.config.mixed_precision is None


EXIT = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("left:", dist.is_initialized()))
{before}
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.runtime.session import build_session
session = build_session(SessionConfig(cpu=True, backend="gloo"))
print(session.topology.backend)
"""


def test_the_group_that_a_session_created_is_destroyed_at_exit(tmp_path: Path) -> None:
    output = run(EXIT.format(before=""), **ALONE, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert output.split("\n")[:2] == ["gloo", "left: False"]


def test_a_group_of_the_caller_is_used_and_left_alone(tmp_path: Path) -> None:
    store = f"dist.FileStore({str(tmp_path / 'store')!r}, 1)"
    before = f"dist.init_process_group('gloo', store={store}, rank=0, world_size=1)"
    assert run(EXIT.format(before=before)).split("\n")[:2] == ["gloo", "left: True"]


def test_a_group_is_not_destroyed_by_a_fork_of_its_process() -> None:
    script = """
import os, weakref, torch.distributed as dist
from accelerate_cpp.runtime import session
class Group:
    pass
group, other = Group(), Group()
session.dist = type("Spy", (), {
    "is_initialized": staticmethod(lambda: True),
    "group": type("Group", (), {"WORLD": group}),
    "destroy_process_group": staticmethod(lambda: print("destroyed")),
})
for created in [(group, os.getpid() + 1), (other, os.getpid())]:
    session._created = weakref.ref(created[0]), created[1]
    session.end_session()
print("before", flush=True)
session._created = weakref.ref(group), os.getpid()
session.end_session()
session._created = None
"""
    assert run(script).split() == ["before", "destroyed"]
