from __future__ import annotations

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.machines import (
    ALONE,
    DEFAULT_PORT,
    Launchers,
    find_launchers,
    first_host,
    refuse_batch_job,
    started_by_mpi,
)

SLURM_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
SLURM_STEP = SLURM_JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
KUBERNETES = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-0",
    "PET_MASTER_PORT": "23456",
}


def test_launcher_that_nobody_started_among_others_is_alone() -> None:
    assert find_launchers({}) == ALONE
    assert find_launchers(SLURM_JOB | {"SLURM_JOB_NUM_NODES": "1"}) == ALONE


@pytest.mark.parametrize(
    ("task", "node", "local", "local_count"), [("0", "0", "0", 2), ("3", "1", "1", 2), ("4", "2", "0", 1)]
)
def test_step_of_slurm_numbers_its_tasks(task: str, node: str, local: str, local_count: int) -> None:
    found = find_launchers(SLURM_STEP | {"SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local})
    assert (found.count, found.rank, found.local_count, found.local_rank) == (5, int(task), local_count, int(local))
    assert found.address == "gpu007"
    assert not found.on_one_machine


def test_tasks_of_one_step_agree_on_a_port_and_another_step_has_another() -> None:
    ports = {
        find_launchers(SLURM_STEP | {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_STEP_ID": step}).port
        for step in ("0", "0", "1")
    }
    assert len(ports) == 2


def test_batch_job_of_several_nodes_is_refused_without_srun() -> None:
    with pytest.raises(InvalidArgument, match=r"has 3 nodes.*srun --ntasks-per-node=1"):
        refuse_batch_job(SLURM_JOB)
    refuse_batch_job(SLURM_STEP)
    assert find_launchers(SLURM_JOB) == ALONE


def test_mpi_is_known_by_its_variables() -> None:
    assert [started_by_mpi(environ) for environ in (OPEN_MPI, SLURM_STEP, {})] == [True, False, False]


def test_open_mpi_numbers_its_processes_and_leaves_the_address_open() -> None:
    found = find_launchers(OPEN_MPI)
    assert (found.count, found.rank, found.local_count, found.local_rank) == (4, 3, 2, 1)
    assert found.address is None
    assert find_launchers(OPEN_MPI | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}).port == 1234


def test_processes_of_mpi_on_one_machine_meet_there() -> None:
    found = find_launchers(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    assert found.on_one_machine
    assert found.address == "127.0.0.1"


def test_mpi_wins_over_the_step_of_slurm_that_its_daemons_run_in() -> None:
    assert find_launchers(SLURM_STEP | OPEN_MPI).source.startswith("Open MPI")


def test_hydra_numbers_its_processes() -> None:
    found = find_launchers({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"})
    assert (found.count, found.rank, found.local_count, found.local_rank) == (2, 1, 2, 1)


def test_kubernetes_says_all() -> None:
    assert find_launchers(KUBERNETES) == Launchers(
        count=2,
        rank=1,
        address="job-0",
        port=23456,
        workers_each=4,
        source="Kubernetes (PET_NNODES, PET_NODE_RANK)",
    )
    indexed = {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0"}
    assert find_launchers(indexed).port == DEFAULT_PORT


def test_kubernetes_without_a_rank_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="PET_NODE_RANK"):
        find_launchers({"PET_NNODES": "2"})


def test_rank_beyond_the_number_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 2 of 2"):
        Launchers(count=2, rank=2)


@pytest.mark.parametrize(("name", "text"), [("OMPI_COMM_WORLD_RANK", "x"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "")])
def test_variable_that_is_no_number_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        find_launchers(OPEN_MPI | {name: text})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-010,12],login", "gpu007"),
        ("a[3]b,c", "a3b"),
        ("r[1-2]-ib", "r1-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
