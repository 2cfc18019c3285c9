"""What DeepSpeed's launcher passes on to other machines, and how it is run; a stand-in records what it is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerate_cpp.launch.workers.over_deepspeed import (
    Passed,
    environment_of_runner,
    passed_variables,
    users_lines,
)

PATIENCE_SECONDS = 60


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1,2:3/x-y@z+w=v.%", "1,2:3/x-y@z+w=v.%%"),
        ("a b;c", "a b;c"),
        ('"$HOME" `id` \\', '\\"\\$HOME\\" \\`id\\` \\\\'),
        ("ä", "ä"),
    ],
)
def test_for_pdsh_a_text_is_written_so_that_a_shell_reads_it(text: str, written: str) -> None:
    assert passed_variables({"A": text}, "pdsh") == Passed((f"A={written}\n",))


def test_a_shell_reads_what_was_written() -> None:
    text = 'a  "b" $HOME `id` \\n \\ % ;<>&|*?[]{}~#'
    (line,) = passed_variables({"A": text}, "pdsh").lines
    name, _, written = line.strip().partition("=")
    script = f'export {name}="{written}"; printf %s "$A"'.replace("%%", "%")  # as DeepSpeed and pdsh do
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == text


def test_what_would_arrive_otherwise_is_left_out_and_named() -> None:
    found = passed_variables({"A": "x\ny", "B": " x", "BASH_FUNC_f%%": "() { :; }", "OK": "1"}, "pdsh")
    assert (found.lines, found.unfit) == (("OK=1\n",), ("A", "B", "BASH_FUNC_f%%"))
    through_mpi = passed_variables({"A": "a b", "B": "x;y", "OK": "50%"}, "openmpi")
    assert (through_mpi.lines, through_mpi.unfit) == (("OK=50%\n",), ("A", "B"))
    assert [*through_mpi.sentences()] == [
        "workers on the machines of the file do not get A, B, as DeepSpeed's launcher would change the text"
    ]


def test_secrets_and_what_is_of_this_machine_stay_here() -> None:
    given = {"HF_TOKEN": "s", "WANDB_API_KEY": "s", "HOSTNAME": "a", "SSH_CLIENT": "b", "HOME": "/root", "EMPTY": ""}
    found = passed_variables(given | {"HOMEWORK": "1"}, "pdsh")
    assert (found.lines, found.secret, found.unfit) == (("HOMEWORK=1\n",), ("HF_TOKEN", "WANDB_API_KEY"), ())
    (sentence,) = found.sentences()
    assert "do not get HF_TOKEN, WANDB_API_KEY" in sentence
    assert "~/.deepspeed_env passes it" in sentence


def test_what_the_user_has_passed_comes_first_and_is_not_missed() -> None:
    found = passed_variables({"HF_TOKEN": "s", "A": "x\ny", "B": "1"}, "pdsh", ["HF_TOKEN=s\n", "A =2\n", "B=2\n"])
    assert found == Passed(("HF_TOKEN=s\n", "A =2\n", "B=2\n", "B=1\n"))
    assert [*found.sentences()] == []


@pytest.mark.parametrize("way", ["nossh", "slurm"])
def test_where_the_whole_environment_arrives_nothing_is_passed(way: str) -> None:
    assert passed_variables({"HF_TOKEN": "s", "A": "x\ny"}, way) == Passed(())


EXPORTED = {  # by DeepSpeed's launcher, without being told: on the command line of pdsh, mpirun or srun
    "MLFLOW_TRACKING_TOKEN": "s",
    "PYTHON_COOKIE": "s",
    "MV2_KEY": "s",
    "UCX_PASS": "s",
    "NCCL_AUTH": "s",
    "HCCL_AUTH": "s",
    "PYTHON_INDEX": "https://s@host",
}


@pytest.mark.parametrize("way", ["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_deepspeeds_launcher_does_not_see_the_secrets_that_it_would_export(way: str) -> None:
    kept = {"HF_TOKEN": "s", "SSH_AUTH_SOCK": "/x", "MLFLOW_EXPERIMENT_NAME": "a", "PYTHONPATH": "/y", "PATH": "/bin"}
    kept |= {"NCCL_IB_PKEY": "0x8001", "UCX_IB_PKEY": "0x8001"}
    assert environment_of_runner(EXPORTED | kept, way) == kept
    assert set(EXPORTED) <= set(passed_variables(EXPORTED | kept, way).secret)


def test_through_slurm_only_what_would_be_on_the_command_line_is_missing() -> None:
    found = passed_variables(EXPORTED | {"HF_TOKEN": "s", "A": "1"}, "slurm", ["NCCL_AUTH=s\n"])
    assert (found.lines, set(found.secret)) == (("NCCL_AUTH=s\n",), set(EXPORTED) - {"NCCL_AUTH"})


def test_a_launcher_of_one_machine_keeps_the_whole_environment() -> None:
    assert environment_of_runner(EXPORTED, "nossh") == EXPORTED


def test_the_files_of_the_user_come_first(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(f"A={folder.name}\n\nno line\n")
    (here / "own").write_text("B=1")
    assert [*users_lines({}, (home, here))] == ["A=home\n", "A=here\n"]
    assert [*users_lines({"DS_ENV_FILE": "own"}, (home, here))] == ["B=1\n"]
    assert [*users_lines({"DS_ENV_FILE": str(here / "own")}, (home,))] == ["B=1\n"]


RUNNER = """
import json, os, sys, time
from pathlib import Path
name = os.environ["DS_ENV_FILE"]
first, again = (Path(name).read_text() for _ in range(2))
try:
    print(json.dumps([sys.argv[1:], os.path.isfile(name), first, again, sorted(os.environ), os.getpid()]), flush=True)
    if "waits" in sys.argv:
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.exit(7 if "fails" in sys.argv else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "runner.py").write_text(RUNNER)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("OWN=1\n")
    return tmp_path


def started(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    flags = ["--cpu", "--use_deepspeed", "--num_machines", "2", "--deepspeed_hostfile", "hosts"]
    environment = {**os.environ, "HOME": str(folder / "home"), "HF_HOME": str(folder), "PYTHONPATH": "", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate_cpp.commands.launch", *flags, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_deepspeeds_launcher_gets_its_command_and_a_file_in_memory(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with started(folder, "--zero_stage", "3", "train.py", "x", TRICKY='a "b"', HF_TOKEN="s", NCCL_AUTH="s") as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    arguments, is_file, text, again, names, _ = json.loads(out)
    assert process.returncode == 0, err
    tail = "--no_local_rank --launcher pdsh --master_port 29500 train.py x"
    assert " ".join(arguments) == f"--hostfile hosts {tail}"
    assert (is_file, again) == (True, text)
    first, *lines = text.splitlines()
    assert first == "OWN=1"
    assert {'TRICKY=a \\"b\\"', "ACCELERATE_DEEPSPEED_ZERO_STAGE=3", "DS_ACCELERATOR=cpu"} <= set(lines)
    assert "do not get HF_TOKEN, NCCL_AUTH" in err
    assert ("TRICKY" in names, "NCCL_AUTH" in names) == (True, False)
    assert sorted(path.name for path in folder.iterdir()) == before


ON_ONE = ["--deepspeed_inclusion_filter=a", "--deepspeed_inclusion_filter=a:0@a:1", "--deepspeed_exclusion_filter=b"]
ON_MORE = [
    "--deepspeed_inclusion_filter=a@b:0",
    "--deepspeed_inclusion_filter=c",  # DeepSpeed refuses it
    "--deepspeed_exclusion_filter=b:0",
    "--deepspeed_exclusion_filter=b@b:0",  # which DeepSpeed takes for b:0
]


@pytest.mark.parametrize("words", [*ON_ONE, *ON_MORE])
def test_a_filter_that_leaves_one_machine_leaves_the_whole_environment(folder: Path, words: str) -> None:
    (folder / "hosts").write_text("a slots=2\nb slots=2\n")
    with started(folder, "--zero_stage", "1", words, "train.py", MLFLOW_TRACKING_TOKEN="s") as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    *_, names, _ = json.loads(out)
    assert ("MLFLOW_TRACKING_TOKEN" in names) == (words in ON_ONE)
    assert ("do not get" in err) == (words not in ON_ONE)


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_its_exit_status_is_that_of_the_launch(folder: Path, flags: list[str]) -> None:
    with started(folder, *flags, "train.py", "fails") as process:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 7
    assert ("DeepSpeed's launcher failed: exit code 7" in err) == (not flags)


def test_it_is_interrupted_with_the_launch(folder: Path) -> None:
    with started(folder, "train.py", "waits") as process:
        assert process.stdout is not None
        *_, pid = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (130, "interrupted\n"), err
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
