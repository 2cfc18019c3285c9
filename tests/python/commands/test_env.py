"""accelerate-cpp env: versions, hardware, configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.commands import env
from accelerate_cpp.commands.env import facts

MODULES_AFTER = """
import sys
from accelerate_cpp.commands.accelerate_cli import main
sys.argv = ["accelerate-cpp", "env"]
main()
print([name for name in sys.modules if name.split(".")[0] in ("torch", "numpy") or name == "accelerate_cpp._C"])
"""


def test_a_configuration_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    shown = facts(str(path))
    assert shown["configuration"] == "distributed_type='NO', mixed_precision='bf16'"
    assert shown["torch"].startswith("2.")
    assert path.read_text() == "distributed_type: 'NO'\nmixed_precision: bf16\n"


def test_a_machine_without_configuration_says_where_it_would_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert facts(None)["configuration file"] == f"none at {tmp_path}/accelerate/default_config.yaml"


def test_torch_is_not_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES_AFTER], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_programs_get_what_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env, "which", lambda name: None)
    found = env.env_command(env.env_command_parser().parse_args([]))
    assert found["`accelerate` bash location"] == "Not found"
    assert f"- torch: {found['torch']}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("tpu_env: [LEVEL=7, 'DEBUG=True', RATE=-0.5]", "tpu_env=['LEVEL=7', 'DEBUG=True', 'RATE=-0.5']"),
        ("tpu_env: 'LEVEL=7,HF_TOKEN=abc'", "tpu_env=['LEVEL=…']"),
        (
            "tpu_env: [HF_TOKEN=abc, HF_TOKEN=1, NAME=abc, HF_TOKEN abc]",
            "tpu_env=['HF_TOKEN=…', 'HF_TOKEN=…', 'NAME=…', '…']",
        ),
        (
            "commands: [export HF_TOKEN=abc, HF_TOKEN=abc ls, ./run.sh, '']",
            "commands=['export …', '… …', './run.sh', '']",
        ),
        ("commands: pip install git+https://abc@host", "commands=['pip …']"),
    ],
)
def test_of_the_lines_for_a_pod_only_what_is_harmless_is_shown(tmp_path: Path, line: str, shown: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: XLA\n{line}\n")
    configuration = facts(str(path))["configuration"]
    assert shown in configuration
    assert "abc" not in configuration
