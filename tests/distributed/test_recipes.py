"""The recipes for clusters, run as far as one machine can: with a program that stands for srun, and one for pods."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accelerate_cpp.launch.plan.host_resources import free_port

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_SECONDS = 300.0
SCRIPT = """
import torch
from accelerate_cpp import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(1.0)).item()
print("told", accelerator.process_index, accelerator.local_process_index, total, flush=True)
accelerator.end_training()
"""
# Starts the tasks of a step, as many on each of two "nodes" as the script's own lines ask for. Once all have written a
# file, they get the signal that the script asks for, and none of the processes that they have started.
SRUN = """
import glob, os, re, signal, subprocess, sys, time
lines = open(os.environ["BATCH_SCRIPT"]).read()
asked = [re.search(rf"^#SBATCH --{name}=(\\d+)", lines, re.M) for name in ("nodes", "ntasks-per-node")]
nodes, per_node = (int(match[1]) for match in asked)
command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes * per_node)}
step |= {"SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})", "SLURM_STEP_NODELIST": "localhost"}
tasks = [
    subprocess.Popen(command, env=os.environ | step | {
        "SLURM_PROCID": str(task), "SLURM_NODEID": str(task // per_node), "SLURM_LOCALID": str(task % per_node)})
    for task in range(nodes * per_node)
]
asked = re.search(r"^#SBATCH --signal=(\\w+)@", lines, re.M)
while any(task.poll() is None for task in tasks):
    if len(glob.glob("ready-*")) == len(tasks):
        for number, task in enumerate(tasks):
            os.remove(f"ready-{number}")
            os.kill(task.pid, signal.Signals[f"SIG{asked[1]}"])
    if any(task.poll() for task in tasks) and "--kill-on-bad-exit=1" in sys.argv:
        for task in tasks:
            task.terminate()
    time.sleep(0.02)
sys.exit(max(task.wait() for task in tasks))
"""


def _told(output: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in output.splitlines() if line.startswith("told "))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("train.sbatch", [["0", "0", "2.0"], ["1", "0", "2.0"]]),
        ("task-per-worker.sbatch", [["0", "0", "4.0"], ["1", "1", "4.0"], ["2", "0", "4.0"], ["3", "1", "4.0"]]),
    ],
)
def test_batch_script_trains_on_all_nodes(tmp_path: Path, recipe: str, expected: list[list[str]]) -> None:
    done = _batch(tmp_path, recipe, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert _told(done.stdout) == expected


# One rank leaves when the launcher of the other one has left.
LEAVES = """
import glob, os, sys, time
while os.environ["RANK"] == "1" and not glob.glob(".digits-*.saved"):
    time.sleep(0.02)
sys.exit(75)
"""


def test_batch_script_queues_a_job_again_that_has_saved_its_state(tmp_path: Path) -> None:
    done = _batch(tmp_path, "train.sbatch", LEAVES)
    assert done.returncode == 0, done.stderr
    assert "scontrol requeue 12" in done.stdout.splitlines()
    assert not list(tmp_path.glob(".digits-*"))


TRAINS_ON = """
import pathlib, time
import torch
from accelerate_cpp import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.leave_if_preempted("checkpoint")
pathlib.Path(f"ready-{accelerator.process_index}").touch()
while True:
    time.sleep(0.01)
    accelerator.leave_if_preempted("checkpoint")
"""


def test_a_notice_to_the_tasks_of_a_batch_script_saves_the_state_and_queues_the_job_again(tmp_path: Path) -> None:
    done = _batch(tmp_path, "train.sbatch", TRAINS_ON)
    assert done.returncode == 0, done.stderr
    assert "scontrol requeue 12" in done.stdout.splitlines()
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_batch_script_does_not_queue_a_job_again_that_has_failed(tmp_path: Path) -> None:
    done = _batch(tmp_path, "train.sbatch", "import sys; sys.exit(3)")
    assert done.returncode == 3, done.stderr
    assert "scontrol" not in done.stdout


def _batch(tmp_path: Path, recipe: str, script: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "srun.py").write_text(SRUN)
    (tmp_path / "scontrol.py").write_text("import sys; print('scontrol', *sys.argv[1:])")
    for name, command in (
        ("srun", tmp_path / "srun.py"),
        ("scontrol", tmp_path / "scontrol.py"),
        ("accelerate-cpp", "-m accelerate_cpp.commands.accelerate_cli"),
    ):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        program.chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BATCH_SCRIPT": str(EXAMPLES / "slurm" / recipe),
        "TRAIN_SCRIPT": "train.py",
        "ACCELERATE_USE_CPU": "1",
        "MASTER_PORT": str(free_port()),
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NUM_NODES": "2",
    }
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, job["BATCH_SCRIPT"]],
        cwd=tmp_path,
        env=os.environ | job,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_pods_of_the_manifest_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    # The name of the first pod in the service, which only Kubernetes knows.
    assert variables["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    ignored = job["spec"]["podFailurePolicy"]["rules"][0]
    assert (ignored["action"], ignored["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (ignored["onExitCodes"]["containerName"], pod["restartPolicy"]) == (container["name"], "Never")
    assert int(variables["PET_NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    variables |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
    arguments = [argument.replace("examples/digits.py", "train.py") for argument in container["args"]]
    command = [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", *arguments]
    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | variables | {"JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    told = []
    for each in pods:
        out, err = each.communicate(timeout=PATIENCE_SECONDS)
        assert each.returncode == 0, err
        told += _told(out)
    assert sorted(told) == [[str(rank), str(rank % 2), "4.0"] for rank in range(4)]


def test_everything_that_the_dockerfile_copies_is_there() -> None:
    lines = (EXAMPLES / "docker" / "Dockerfile").read_text().splitlines()
    copied = [match[1] for line in lines if (match := re.match(r"COPY (?!--from)(\S+) ", line))]
    assert copied == [".", "examples"]
    assert all((EXAMPLES.parent / name).exists() for name in (*copied, "requirements/build.txt"))
