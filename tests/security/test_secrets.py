"""Secrets in the environment stay there: no report, log, message or command line has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from accelerate_cpp.launch.workers.over_ssh import is_carried, is_secret
from elastic_run import first_of_two

VALUE = "s3cr3t-f8a1"
SECRETS = {
    name: f"{VALUE}-{number}"
    for number, name in enumerate(
        [
            "HF_TOKEN",
            "HF_TOKENS_2",
            "HF_S3KEY",
            "PYTHON_API2KEY",
            "HF_X-TOKEN",
            "HF_MY.TOKEN",
            "HF_TOKENv2",
            "HF_PASSPHRASES",
            "HF_AUTHENTICATION",
            "HF_API_KEYID",
            "HUGGING_FACE_HUB_TOKEN",
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "ACCELERATE_PASSWORD",
            "NCCL_AUTH",
            "TORCH_CREDENTIALS",
            "OMP_SECRETS",
            "PYTHON_COOKIE",
            "HF_PASSWD",
            "ACCELERATE_apikey",
            "GITHUB_TOKEN1",
            "MLFLOW_TRACKING_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "MYSQL_PWD",
            "DB_PASS",
            "GITHUB_PAT",
            "AZURE_STORAGE_CONNECTION_STRING",
            "SENTRY_DSN",
            "SLACK_WEBHOOK_URL",
            "GIT_CREDS",
            "SLURM_JWT",
            "ACCELERATE_CPP_RUN_SECRET",
        ]
    )
} | {
    "HF_ENDPOINT": f"https://user:{VALUE}@hub.invalid/x",
    "ACCELERATE_PROXY": f"http://user:{VALUE}/+@proxy.invalid",
    "MLFLOW_TRACKING_URI": f"https://{VALUE}@mirror.invalid",
    "DATABASE_URL": f"postgres://user:{VALUE}@db.invalid/x",
    "SLASHES_URL": f"http://user:1a/2/{VALUE}@proxy.invalid",
    "REDIS_URL": f"redis://:{VALUE}@db.invalid:6379/0",
    "QUOTE_URL": f'http://user:{VALUE}"/+@proxy.invalid',
    "MIRRORS": f"https://hub.invalid:8080/x@v1,https://{VALUE}@mirror.invalid",
    "GIT_URL": f"https://git:{VALUE}@git.invalid/x@v1",
    "IMAGE": f"docker://user:{VALUE}@registry.invalid/x@sha256:00ff",
    "SETTINGS": f'{{"u":"https://x/","m":"https://{VALUE}@sentry.invalid/1"}}',
}
SCRIPT = """
import sys
from accelerate_cpp import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.print("trains")
if sys.argv[1:] == ["fails"]:
    raise ValueError("it fails")
"""
NOTEBOOK = """
import sys
from accelerate_cpp import notebook_launcher
def train():
    import runpy
    sys.argv = ["train.py", "fails"]
    runpy.run_path("train.py", run_name="__main__")
notebook_launcher(train, num_processes=2)
"""
RECORDS = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" >> "$RECORD"\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("a.invalid slots=1\nb.invalid slots=1\n")
    (tmp_path / "bin").mkdir()
    for name in ("ssh", "mpirun", "pdsh", "gcloud", "ompi_info", "sinfo", "srun"):
        program = tmp_path / "bin" / name
        program.write_text(RECORDS)
        program.chmod(0o755)
    # DeepSpeed's launcher asks the first machine for its address.
    (tmp_path / "bin" / "ssh").write_text(f"{RECORDS}echo 192.0.2.1\n")
    (tmp_path / "bin" / "mpirun").write_text(
        RECORDS.replace("printf", 'case "$1" in --version) echo "Open MPI 4"; exit;; esac\nprintf', 1)
    )
    return tmp_path


def all_of(
    place: Path,
    *words: str,
    program: Sequence[str] = ("-m", "accelerate_cpp.commands.accelerate_cli"),
    stays_out: bool = True,
) -> str:
    """Whatever a command prints and writes, with the secrets in its environment."""
    environ = {
        **os.environ,
        **SECRETS,
        "MLFLOW_EXPERIMENT_NAME": "harmless",
        "RECORD": str(place / "record"),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
    }
    found = subprocess.run(
        [sys.executable, *program, *words], cwd=place, env=environ, capture_output=True, text=True, timeout=240
    )
    given = {place / "train.py", place / "hosts", *(place / "bin").iterdir()}
    files = [path for path in place.rglob("*") if path.is_file() and path not in given]
    text = found.stdout + found.stderr + "".join(path.read_text(errors="replace") for path in files)
    if stays_out:
        assert VALUE not in text
    return text


LAUNCH = ("launch", "--cpu", "--num_processes", "2")
PATHS = {
    "env": (("env",), "torch"),
    "dry run": (("launch", "--cpu", "--num_processes", "2", "--dry_run", "train.py"), "train.py"),
    "run with logs": ((*LAUNCH, "--log_dir", "logs", "--tee", "3", "train.py"), "trains"),
    "failure": ((*LAUNCH, "--report", "report.json", "train.py", "fails"), "ValueError: it fails"),
    "debug": ((*LAUNCH, "--debug", "--report", "report.json", "train.py", "fails"), "ValueError: it fails"),
    "monitor": ((*LAUNCH, "--monitor", "train.py"), "trains"),
    "check": (("check", "--num_processes", "2", "train.py"), "train"),
    "ssh": (("launch", "--cpu", "--hostfile", "hosts", "train.py"), "a.invalid"),
    "mpirun": (("launch", "--cpu", "--mpirun_hostfile", "hosts", "--num_machines", "2", "train.py"), "ppr:1:node"),
    "gcloud": (
        ("launch", "--tpu", "--tpu_cluster", "--tpu_name", "pod", "--tpu_zone", "z", "train.py"),
        "tpu-vm",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_no_path_shows_a_secret_of_the_environment(place: Path, name: str) -> None:
    words, expected = PATHS[name]
    assert expected in all_of(place, *words)


@pytest.mark.parametrize(
    "more", [("--report", "report.json"), ("--rdzv_backend", "c10d")], ids=["rounds", "torch's agent"]
)
def test_no_run_whose_machines_come_and_go_shows_a_secret(place: Path, more: tuple[str, ...]) -> None:
    logs = ("--log_dir", "logs", "--tee", "3")
    words = ("launch", "--cpu", *first_of_two(), *logs, *more, "train.py", "fails")
    assert "ValueError: it fails" in all_of(place, *words)
    assert any("ValueError: it fails" in path.read_text() for path in place.glob("logs/**/*.log"))


def test_no_notebook_shows_a_secret(place: Path) -> None:
    assert "ValueError: it fails" in all_of(place, program=("-c", NOTEBOOK))


# Not imported here: what that sets in the environment would keep later tests from forking their processes.
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("way", "program"),
    [
        ("pdsh", "pdsh"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [("openmpi", "mpirun"), ("slurm", "srun")]),
    ],
)
def test_deepspeeds_launcher_puts_no_secret_on_a_command_line(place: Path, way: str, program: str) -> None:
    text = all_of(
        place,
        *("launch", "--cpu", "--use_deepspeed", "--zero_stage", "1", "--num_machines", "2", "--num_processes", "2"),
        *("--deepspeed_multinode_launcher", way, "--deepspeed_hostfile", "hosts", "train.py"),
    )
    command = (place / "record").read_text().partition(f"{place}/bin/{program}\n")[2]
    assert "MLFLOW_EXPERIMENT_NAME=harmless" in command, text
    assert "do not get" in text
    assert "MLFLOW_TRACKING_TOKEN" in text  # by its name only
    assert "MLFLOW_TRACKING_TOKEN" not in command


def test_what_a_program_prints_itself_is_passed_on(place: Path) -> None:
    """The search above would find a secret."""
    (place / "train.py").write_text("import os; print(os.environ['HF_TOKEN'])")
    assert VALUE in all_of(place, *LAUNCH, "train.py", stays_out=False)


def shown_by_env(place: Path, content: str) -> str:
    (place / "c.yaml").write_text(f"distributed_type: XLA\n{content}\n")
    environ = {**os.environ, **SECRETS}
    command = [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "env", "--config_file", place / "c.yaml"]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert VALUE not in found.stdout + found.stderr
    return found.stdout + found.stderr


def test_the_configuration_file_is_shown_without_the_secrets_that_it_passes_to_a_pod(place: Path) -> None:
    text = shown_by_env(place, f"tpu_env: [HF_TOKEN={VALUE}, LEVEL=7]\ncommands: [export HF_TOKEN={VALUE}]")
    assert "HF_TOKEN=…" in text
    assert "LEVEL=7" in text
    assert "export …" in text


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (f"tpu_env: {{HF_TOKEN: {VALUE}}}", "expected a text or a list of texts, found dict"),
        (f"tpu_env: [HF_TOKEN: {VALUE}]", "expected a text or a list of texts, found dict"),
        (f"tpu_env: LEVEL=7,HF_TOKEN={VALUE}", "tpu_env=['LEVEL=…']"),
        (f"commands: {{export: HF_TOKEN={VALUE}}}", "expected a text or a list of texts, found dict"),
        (f"tpu_env: [HF_TOKEN={VALUE}", "(line 3, column 1)"),
    ],
)
def test_a_configuration_file_of_another_form_is_shown_without_its_secrets(
    place: Path, content: str, shown: str
) -> None:
    assert shown in shown_by_env(place, content)


def test_names_and_values_that_are_withheld() -> None:
    assert [name for name, text in SECRETS.items() if not is_secret(name, text)] == []
    assert not is_carried("DATABASE_URL", "x")  # of no program of ours
    carried = {
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_CACHE": "/x",
        "HF_TOKEN_PATH": "/etc/token",
        "HF_ENDPOINT": "https://hub.invalid:8080/a",
        "PYTHON_KEYRING_BACKEND": "x",
        "OMP_NUM_THREADS": "1",
    }
    assert [name for name, text in carried.items() if not is_carried(name, text)] == []
    harmless = {
        "PWD": "/x",
        "OLDPWD": "/x",
        "PATH": "/bin",
        "PYTHONPATH": "/x",
        "GIT_ASKPASS": "/x",
        "BYPASS_CACHE": "1",
        "NAME_PATTERN": "*",
        "DB_PASS_FILE": "/x",
        "REMOTE": "git@host.invalid:x",
        "NCCL_IB_PKEY": "0x8001",
        "UCX_IB_PKEY": "0x8001",
        "DATA": "hf://datasets/org/ds@v1/train.parquet",
        "MODEL": "hf://gpt2@main/config.json",
        "IMAGE": "docker://repo/img@sha256:00ff",
        "BARE_IMAGE": "docker://img@sha256:00ff",
        "REQUIREMENT": "git+ssh://git@github.com/org/repo.git@v1",
        "BUCKET": "s3://bucket/run@2024/ckpt",
        "CONTAINER": "abfss://container@account.dfs.core.windows.net/x",
        "PORT": "http://hub.invalid:8080/x@v1",
        "PORT_OF_SIX": "http://[::1]:8080/x@v1",
        "SETTINGS": '{"u":"https://x/","m":"a@b.c"}',
        "MORE_SETTINGS": '{"u":"https://x:80","m":"a@b.c"}',
    }
    assert [name for name, text in harmless.items() if is_secret(name, text)] == []
