from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.machines import Launchers
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers import exec_with_parent as tied
from accelerate_cpp.launch.workers.over_mpi import hosts_of, launchers_to_come, mpirun_command

TWO = Launchers(2, address="a")


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("# ours\na slots=2\n\nb:2 # new\na\n")
    return tmp_path / "hosts"


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Puts an mpirun of this ``version`` into PATH."""
    (folder / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_lines_begin_with_names(hosts: Path) -> None:
    assert hosts_of(hosts) == ["a", "b"]
    hosts.write_text("\n# none\n")
    with pytest.raises(InvalidArgument, match="at least one machine"):
        hosts_of(hosts)
    with pytest.raises(InvalidArgument, match="--mpirun_hostfile absent: cannot be read"):
        hosts_of(Path("absent"))


def test_first_machine_has_rank_0_and_all_take_part_unless_fewer_are_asked_for(hosts: Path) -> None:
    found = launchers_to_come(hosts, None, None)
    assert (found.count, found.rank, found.address) == (2, 0, "a")
    assert launchers_to_come(hosts, 1, "10.0.0.1").count == 1
    assert launchers_to_come(hosts, 2, "10.0.0.1").address == "10.0.0.1"
    with pytest.raises(InvalidArgument, match="names 2 of the 3 machines"):
        launchers_to_come(hosts, 3, None)


def test_open_mpi_starts_a_launcher_on_each_machine(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, "mpirun (Open MPI) 4.1.4")
    command = mpirun_command(hosts, TWO, ["--cpu", "train.py"], {"OMP_NUM_THREADS": "1", "HOME": "/root"})
    where = f"mpirun --hostfile {hosts} -n 2 --map-by ppr:1:node --bind-to none -x OMP_NUM_THREADS"
    assert command[: len(where.split())] == tuple(where.split())
    launcher = (*module_program("accelerate_cpp.commands.launch"), "--main_process_ip", "a", "--cpu", "train.py")
    assert command[len(where.split()) :] == (sys.executable, tied.__file__, *launcher)
    assert "--main_process_ip" not in mpirun_command(hosts, Launchers(address="a"), ["train.py"], {})


def test_hydra_starts_a_launcher_on_each_machine(hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "HYDRA build details:")
    command = mpirun_command(hosts, TWO, ["train.py"], {"OMP_NUM_THREADS": "1"})
    assert command[:8] == ("mpirun", "-f", str(hosts), "-n", "2", "-ppn", "1", sys.executable)


def test_unknown_or_absent_mpi_is_refused(hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "mine 1.0")
    with pytest.raises(InvalidArgument, match=r"says 'mine 1\.0': expected Open MPI"):
        mpirun_command(hosts, TWO, ["train.py"])
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    with pytest.raises(InvalidArgument, match="mpirun cannot be started: No such file"):
        mpirun_command(hosts, TWO, ["train.py"])
