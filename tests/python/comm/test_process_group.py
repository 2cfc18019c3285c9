"""The default process group that the environment describes."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.comm.process_group import DEFAULT_TIMEOUT, _await_rank_0, choose_backend, connect
from accelerate_cpp.errors import InvalidArgument, Timeout
from accelerate_cpp.launch.plan.host_resources import free_port

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_CPP_RENDEZVOUS_FD")
linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="shared-memory collectives exist on Linux only")


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment of the only worker of our launcher."""
    with (tmp_path / "rendezvous").open("w+b") as file:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("ACCELERATE_CPP_RENDEZVOUS_FD", str(file.fileno()))
        yield


def core_backend() -> C10dBackend:
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, C10dBackend)
    return backend


def test_without_a_launcher_there_is_no_group() -> None:
    assert connect(device_type="cpu", collectives=str) is False
    assert not dist.is_initialized()


def test_without_distributed_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert connect(device_type="cpu", collectives=str) is False


@linux_only
@pytest.mark.usefixtures("alone")
def test_our_launchers_descriptor_gives_a_group_over_shared_memory() -> None:
    assert connect(device_type="cpu", collectives=str) is True
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend_config()) == (0, 1, "cpu:shm")
    assert core_backend().timeout == DEFAULT_TIMEOUT == timedelta(minutes=30)


@linux_only
@pytest.mark.usefixtures("alone")
def test_the_timeout_is_that_of_every_collective() -> None:
    connect(device_type="cpu", collectives=str, timeout=timedelta(seconds=77))
    assert core_backend().timeout == timedelta(seconds=77)


@pytest.mark.usefixtures("alone")
def test_the_users_backend_wins() -> None:
    connect(device_type="cpu", collectives=str, backend="gloo")
    assert dist.get_backend() == "gloo"


@pytest.mark.usefixtures("alone")
def test_a_group_that_exists_is_used_as_it_is() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert connect(device_type="cpu", collectives=str, backend="shm") is True
    assert dist.group.WORLD is group


@linux_only
def test_torchs_variables_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert connect(device_type="cpu", collectives=str) is True
    assert dist.get_backend_config() == "cpu:shm"


def test_a_port_that_is_taken_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        torchs = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in torchs.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidArgument, match=rf"port {port}: .*--main_process_port, torchrun"):
            connect(device_type="cpu", collectives=str)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", ["-1", "1", "7"])
def test_a_rank_outside_the_world_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(InvalidArgument, match=rf"RANK={rank} is not within WORLD_SIZE=1"):
        connect(device_type="cpu", collectives=str)


@pytest.mark.usefixtures("alone")
def test_a_missing_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    with pytest.raises(InvalidArgument, match="RANK"):
        connect(device_type="cpu", collectives=str)


@linux_only
@pytest.mark.usefixtures("alone")
def test_a_rank_that_never_comes_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Timeout, match="which did not answer"):
        connect(device_type="cpu", collectives=str, timeout=timedelta(milliseconds=200))


def test_a_rank_0_that_does_not_listen_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    described = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**described, "ACCELERATE_CPP_SLOW_WAIT_SECONDS": "0.05"}.items():
        monkeypatch.setenv(name, value)
    awaited = f"rank 0, which does not listen at 127.0.0.1, port {port} \\(.*refused\\)"
    with pytest.raises(Timeout, match=f"did not all join within 0.2 s: waited for {awaited}; its process has ended"):
        connect(device_type="cpu", collectives=str, timeout=timedelta(seconds=0.2))
    assert len(caplog.records) == 1
    assert f" s for rank 0, which does not listen at 127.0.0.1, port {port}" in caplog.text


def test_a_rank_0_that_listens_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refusals: list[OSError] = []
    listening: list[socket.socket] = []
    connect_once = socket.create_connection

    def connects(*arguments: object, **options: object) -> socket.socket:
        try:
            return connect_once(*arguments, **options)  # type: ignore[arg-type]
        except OSError as refusal:
            refusals.append(refusal)
            if len(refusals) == 3:
                listening.append(socket.create_server(("127.0.0.1", port)))
            raise

    monkeypatch.setattr(socket, "create_connection", connects)
    _await_rank_0(timedelta(seconds=60))
    assert len(refusals) == 3
    listening[0].close()


def test_the_backend_is_ours_among_cpu_processes_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert choose_backend("cpu", str) == "shm"
    assert choose_backend("cuda", lambda: "nccl") == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert choose_backend("cpu", str) == "gloo"
