from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from accelerate_cpp.launch.workers import exec_with_rank

CODE = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)]))"


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "MASTER_ADDR": "head",
            },
            "head",
        ),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_STEP_NODELIST": "gpu[7-8]",
                "SLURM_PROCID": "3",
                "SLURM_NODEID": "1",
                "SLURM_LOCALID": "1",
            },
            "gpu7",
        ),
    ],
)
def test_program_takes_its_place_and_is_told_the_rank(variables: dict[str, str], address: str) -> None:
    told = {**os.environ, **variables, "MASTER_PORT": "29500"}
    with subprocess.Popen(
        [sys.executable, exec_with_rank.__file__, sys.executable, "-c", CODE, "--flag"],
        stdout=subprocess.PIPE,
        text=True,
        env=told,
    ) as process:
        pid, arguments, environment = json.loads(process.communicate()[0])
    assert (pid, arguments) == (process.pid, ["--flag"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["3", "4", "1", "2", address, "29500"]
